"""Tables of many items: only the columns in which these differ; what they share is said once, above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvctl.views.folded.rows import COUNT, listing
from kvctl.views.screen import Column, Foldable, ScreenPart, TextTable, plain

Item = TypeVar("Item")

LEAST = 3
"""Items from which on it is worth it."""


def differing(items: Sequence[Item], *columns: Column[Item], whole: bool = False) -> Foldable:
    """One item a line. The first column always stands, and all of them where the table is to be ``whole``."""
    return listing(items, *columns, build=None if whole else _slim)


def _slim(made: TextTable, count: int) -> ScreenPart:
    if count < LEAST:
        return made
    cells = [{plain(row[at]) for row in made.rows} for at in range(len(made.headers))]
    standing = [at for at, header in enumerate(made.headers) if not at or header == COUNT]
    alike = [at for at in range(1, len(made.headers)) if len(cells[at]) == 1 and at not in standing]
    kept = [at for at in range(len(made.headers)) if at not in alike]
    shared = ", ".join(
        f"{made.headers[at]} {next(iter(cells[at]))}" for at in alike if cells[at] not in ({"-"}, {""})
    )
    headers = [made.headers[at] for at in kept]
    slim = TextTable(
        headers,
        [[row[at] for at in kept] for row in made.rows],
        [header for header in made.right if header in headers],
    )
    return [f"all {count}: {shared}", "", slim] if shared else [slim]
