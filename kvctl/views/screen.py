"""What a document looks like at a terminal, as plain values: lines, tables, and what depends on the width.

Views are made of these, so that a view needs no library of the terminal and JSON is had without loading one;
`kvctl.views.drawing` makes text of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar


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


Fold = Literal["same", "names", "span"]


class Column(NamedTuple, Generic[Item]):
    """One column of a table: its header, and the cell of an item; None is shown as a dash.

    ``by`` is what rows are sorted by, where the cell's text says it badly: None for an item that has nothing there.
    ``fold`` is what becomes of it where rows are folded: rows must have the ``same``, become a set of ``names``, or the
    ``span`` from the least to the greatest.
    """

    header: str
    of: Callable[[Item], Cell | int | None]
    shown: bool = True
    right: bool = False
    fold: Fold = "same"
    by: Callable[[Item], Any] | None = None


def number(
    header: str,
    of: Callable[[Item], Cell | int | None],
    shown: bool = True,
    *,
    fold: Fold = "same",
    by: Callable[[Item], Any] | None = None,
) -> Column[Item]:
    """A column of numbers, aligned at the right."""
    return Column(header, of, shown, right=True, fold=fold, by=by)


def names(header: str, of: Callable[[Item], Cell | int | None], shown: bool = True) -> Column[Item]:
    """A column of what names or numbers a row: where rows are folded it becomes a set."""
    return Column(header, of, shown, fold="names")


def measure(
    header: str,
    of: Callable[[Item], Cell | int | None],
    by: Callable[[Item], Any],
    shown: bool = True,
) -> Column[Item]:
    """A column of measures, numbers that are sorted by ``by``: where rows are folded it becomes a span."""
    return Column(header, of, shown, right=True, fold="span", by=by)


def table(items: Iterable[Item], *columns: Column[Item]) -> TextTable:
    """One item a line, with the columns that are ``shown``."""
    shown = [column for column in columns if column.shown]
    return TextTable(
        [column.header for column in shown],
        [[cell_of(column.of(item)) for column in shown] for item in items],
        [column.header for column in shown if column.right],
    )


def cell_of(value: Cell | int | None) -> Cell:
    """What a column says of an item, as it is shown."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else value


def plain(cell: Cell) -> str:
    """The text of a cell."""
    return cell.text if isinstance(cell, Styled) else cell


def natural(text: str) -> tuple[tuple[bool, int, str], ...]:
    """What texts are sorted by so that ``decode-2`` comes before ``decode-10``."""
    parts = re.split(r"([0-9]{1,18})", text)
    return tuple((at % 2 == 0, int(part) if at % 2 else 0, part) for at, part in enumerate(parts))


class Foldable(NamedTuple):
    """A part of ``length`` rows that can also be had ``folded``: `kvctl.views.folded.rows` says when."""

    whole: ScreenPart
    folded: Callable[[], ScreenPart]
    length: int


class Indented(NamedTuple):
    """A paragraph that begins two characters further right, in all of its lines."""

    text: str


ScreenPart = (
    Cell
    | tuple[Cell, ...]
    | TextTable
    | Indented
    | Foldable
    | Sequence["ScreenPart"]
    | Callable[[int], "ScreenPart"]
)
"""A line; the pieces of one as a tuple; a table; a list of parts, one below the other; a function of the width."""

STATE_STYLES = {
    **dict.fromkeys(("ready", "alive", "up", "done", "recovered"), "green"),
    **dict.fromkeys(
        ("partial", "draining", "silent", "connecting", "ordered", "forced", "reported", "rescheduled"),
        "yellow",
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


def spaced(parts: Iterable[ScreenPart]) -> list[ScreenPart]:
    """The parts with an empty line between two of them."""
    return [one for part in parts for one in ("", part)][1:]


# --- what changed between two screens of one document ---

MARK = "reverse"
"""The style of what changed."""
CHANGING = frozenset(("SINCE", "AGE", "LEFT", "HEARD", "REGISTERED", "LAST", "RTT"))
"""Headers of columns that change by themselves, as time passes."""
CHANGING_FACTS = frozenset(("up", "loop.lag_seconds", "uptime_seconds"))
"""The same of facts, gauges and counters."""
KEYS = frozenset(("ENGINE", "REQUEST", "FROM", "TO", "RANK", "SEQ", "PEER", "BACKEND", "GAUGE", "COUNTER"))
"""Headers of the columns that say which row it is."""


def marked(now: ScreenPart, before: ScreenPart) -> ScreenPart:
    """The screen ``now``, with what is not as it was in ``before`` in the style `MARK`.

    The n-th table is compared with the n-th that has the same first column. A row that was not there is new, and marked
    whole. Lines of text, and parts that depend on the width, are as they are.
    """
    return _marked(now, _tables(before))


def _tables(part: ScreenPart) -> list[TextTable]:
    if isinstance(part, TextTable):
        return [part]
    if isinstance(part, list):
        return [table for one in part for table in _tables(one)]
    return []


def _marked(part: ScreenPart, tables: list[TextTable]) -> ScreenPart:
    if isinstance(part, TextTable):
        before = next((one for one in tables if one.headers[:1] == part.headers[:1]), None)
        if before is None:
            return part
        tables.remove(before)
        return _compared(part, before)
    if isinstance(part, list):
        return [_marked(one, tables) for one in part]
    return part


def _compared(now: TextTable, before: TextTable) -> TextTable:
    names = [at for at, header in enumerate(now.headers) if header in KEYS] or [0]
    known = {_key(row, before.headers, now.headers, names): row for row in before.rows}
    same = {header: at for at, header in enumerate(before.headers)}
    rows: list[Sequence[Cell]] = []
    for row in now.rows:
        old = known.get(_key(row, now.headers, now.headers, names))
        if old is None:
            rows.append([_with_mark(cell) for cell in row])
        elif not now.headers:
            rows.append([row[0], _compare(row[1], old[1], changing=plain(row[0]) in CHANGING_FACTS)])
        else:
            rows.append(
                [
                    _compare(
                        cell,
                        old[same[header]] if header in same else "",
                        changing=header in CHANGING or plain(row[0]) in CHANGING_FACTS,
                    )
                    for header, cell in zip(now.headers, row, strict=True)
                ]
            )
    return now._replace(rows=rows)


def _key(
    row: Sequence[Cell], headers: Sequence[str], wanted: Sequence[str], names: Sequence[int]
) -> tuple[str, ...]:
    """The cells that name a row, also where its table has other columns beside."""
    if not headers:
        return (plain(row[0]),)
    at = {header: number for number, header in enumerate(headers)}
    return tuple(plain(row[at[wanted[name]]]) for name in names if wanted[name] in at)


def _compare(now: Cell, before: Cell, *, changing: bool) -> Cell:
    return now if changing or plain(now) == plain(before) else _with_mark(now)


def _with_mark(cell: Cell) -> Cell:
    style = cell.style if isinstance(cell, Styled) else ""
    return Styled(plain(cell), f"{style} {MARK}".strip())
