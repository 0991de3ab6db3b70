"""Folds the rows of a table: those that differ only in names, and in what numbers them, become one with a count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvctl.views.folded.names import name_set, pattern
from kvctl.views.screen import (
    Cell,
    Column,
    Foldable,
    ScreenPart,
    Styled,
    TextTable,
    cell_of,
    natural,
    plain,
    table,
)

MANY = 40
"""Rows from which on a table on a terminal folds by itself."""
COUNT = "COUNT"

Item = TypeVar("Item")
BuildPart = Callable[[TextTable, int], ScreenPart]


class _Row(NamedTuple):
    """Items that became one row: the cells that they share, by column, and themselves."""

    cells: Sequence[Cell]
    items: Sequence[int]


def listing(items: Sequence[Item], *columns: Column[Item], build: BuildPart | None = None) -> Foldable:
    """A table of ``items`` that can be had folded. ``build`` makes a part of the table and the number of items."""
    whole = table(items, *columns)

    def built(made: TextTable) -> ScreenPart:
        return build(made, len(items)) if build else made

    return Foldable(built(whole), lambda: built(folded(items, *columns)), len(items))


def folded(items: Sequence[Item], *columns: Column[Item]) -> TextTable:
    """Rows that are alike as one, in the order in which the first of each came, with how many they are."""
    shown = [column for column in columns if column.shown]
    cells = [[cell_of(column.of(item)) for column in shown] for item in items]
    rows = _split(shown, cells)
    made = [_made(shown, row, cells, items) for row in rows]
    headers = [column.header for column in shown]
    return TextTable(
        [headers[0], COUNT, *headers[1:]],
        [[row[0], f"x{len(rows[at].items)}", *row[1:]] for at, row in enumerate(made)],
        [COUNT, *(column.header for column in shown if column.right)],
    )


def _split(shown: Sequence[Column[Item]], cells: Sequence[Sequence[Cell]]) -> list[_Row]:
    """Items by what must be the same, then by the patterns of their names.

    Names whose patterns nobody shares, as hashes are, stand together.
    """
    same = [at for at, column in enumerate(shown) if column.fold == "same"]
    names = [at for at, column in enumerate(shown) if column.fold == "names"]
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(cells):
        alike.setdefault(tuple(plain(row[at]) for at in same), []).append(number)
    rows = []
    for group in alike.values():
        patterns: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for number in group:
            key = tuple(pattern(plain(cells[number][at])) for at in names)
            patterns.setdefault(key, []).append(number)
        single = sorted(number for found in patterns.values() if len(found) == 1 for number in found)
        rows += [found for found in patterns.values() if len(found) > 1]
        rows += [single] if single else []
    return [_Row(cells[found[0]], found) for found in sorted(rows)]


def _made(
    shown: Sequence[Column[Item]], row: _Row, cells: Sequence[Sequence[Cell]], items: Sequence[Item]
) -> list[Cell]:
    made: list[Cell] = []
    for at, column in enumerate(shown):
        texts = [plain(cells[number][at]) for number in row.items]
        if column.fold == "same" or len(set(texts)) == 1:
            made.append(row.cells[at])
        elif column.fold == "names":
            made.append(name_set(texts))
        else:
            made.append(_span(column, [items[number] for number in row.items], texts))
    return made


def _span(column: Column[Item], items: Sequence[Item], texts: Sequence[str]) -> str:
    """``3s..12s``: the least and the greatest of a column of measures."""
    known = [
        (natural(text) if column.by is None else column.by(item), text)
        for item, text in zip(items, texts, strict=True)
        if column.by is None or column.by(item) is not None
    ]
    if not known:
        return "-"
    least, greatest = min(known)[1], max(known)[1]
    return least if least == greatest else f"{least}..{greatest}"


def settled(part: ScreenPart, *, always: bool, by_itself: bool) -> ScreenPart:
    """A part in which what can be folded is, or is not.

    ``always`` folds every such table; ``by_itself`` long ones, where that makes them shorter, and says so below.
    """
    if isinstance(part, Foldable):
        if always:
            return part.folded()
        if not by_itself or part.length <= MANY:
            return part.whole
        short = part.folded()
        rows = _rows(short)
        told = Styled(f"{part.length} rows in {rows}: -o wide has each in a line of its own", "dim")
        return [short, "", told] if rows < part.length else part.whole
    if isinstance(part, list):
        return [settled(one, always=always, by_itself=by_itself) for one in part]
    return part


def _rows(part: ScreenPart) -> int:
    if isinstance(part, TextTable):
        return len(part.rows)
    return sum(map(_rows, part)) if isinstance(part, list) else 0
