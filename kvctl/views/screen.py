"""What a document looks like at a terminal, as plain values: lines, tables, and what depends on the width.

Views are made of these, so that a view needs no library of the terminal and JSON is had without loading one;
`kvctl.views.drawing` makes text of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Styled(NamedTuple):
    """Text in a style: ``red``, ``bold red``, ``dim`` ..."""

    text: str
    style: str


Cell = str | Styled


class TextTable(NamedTuple):
    """Cells in columns. ``right`` names, separated by spaces, the headers of the columns of numbers.

    Without headers the cells are names, shown bold, and values.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: str = ""


class Indented(NamedTuple):
    """A paragraph that begins two characters further right, in all of its lines."""

    text: str


Part = Cell | tuple[Cell, ...] | TextTable | Indented | Sequence["Part"] | Callable[[int], "Part"]
"""A line; the pieces of one as a tuple; a table; a list of parts, one below the other; a function of the width."""

STATE_STYLES = {
    **dict.fromkeys(("ready", "alive", "up", "done", "recovered"), "green"),
    **dict.fromkeys(
        ("partial", "silent", "connecting", "ordered", "forced", "reported", "rescheduled"), "yellow"
    ),
    **dict.fromkeys(("late", "over", "miss", "gone", "down", "unreachable"), "red"),
}


def state(name: str) -> Styled:
    """A state in its colour."""
    return Styled(name, STATE_STYLES.get(name, ""))


def facts(*rows: tuple[str, Cell]) -> TextTable:
    """Names and values, one a line."""
    return TextTable((), rows)


def sizes(**sizes: int) -> str:
    """``tp2``, ``tp4 pp2``, ``tp4 dcp2``: the sizes that are not one, and always tp."""
    return " ".join(f"{name}{count}" for name, count in sizes.items() if count > 1 or name == "tp")


def spaced(parts: Iterable[Part]) -> list[Part]:
    """The parts with an empty line between two of them."""
    return [one for part in parts for one in ("", part)][1:]
