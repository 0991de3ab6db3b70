"""What a document looks like at a terminal, as plain values: lines, tables, and what depends on the width.

Views are made of these, so that a view needs no library of the terminal and JSON is had without loading one;
`kvctl.views.drawing` makes text of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar


class Styled(NamedTuple):
    """Text in a style: ``red``, ``bold red``, ``dim`` ..."""

    text: str
    style: str


Cell = str | Styled


class TextTable(NamedTuple):
    """Cells in columns. ``right`` are the headers of the columns of numbers.

    Without headers the cells are names, shown bold, and values.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Sequence[str] = ()


Item = TypeVar("Item")


class Column(NamedTuple, Generic[Item]):
    """One column of a table: its header, and the cell of an item; None is shown as a dash."""

    header: str
    of: Callable[[Item], Cell | int | None]
    shown: bool = True
    right: bool = False


def number(header: str, of: Callable[[Item], Cell | int | None], shown: bool = True) -> Column[Item]:
    """A column of numbers, aligned at the right."""
    return Column(header, of, shown, right=True)


def table(items: Iterable[Item], *columns: Column[Item]) -> TextTable:
    """One item a line, with the columns that are ``shown``."""
    shown = [column for column in columns if column.shown]
    return TextTable(
        [column.header for column in shown],
        [[_cell(column.of(item)) for column in shown] for item in items],
        [column.header for column in shown if column.right],
    )


def _cell(value: Cell | int | None) -> Cell:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else value


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


def yes_or_no(*, good: bool) -> Styled:
    """Whether something is as it should be."""
    return Styled("yes", "green") if good else Styled("NO", "bold red")


def facts(*rows: tuple[str, Cell]) -> TextTable:
    """Names and values, one a line."""
    return TextTable((), rows)


def sizes(**sizes: int) -> str:
    """``tp2``, ``tp4 pp2``, ``tp4 dcp2``: the sizes that are not one, and always tp."""
    return " ".join(f"{name}{count}" for name, count in sizes.items() if count > 1 or name == "tp")


def spaced(parts: Iterable[Part]) -> list[Part]:
    """The parts with an empty line between two of them."""
    return [one for part in parts for one in ("", part)][1:]
