"""Tables of many items: only the columns in which these differ; what they share is said once, above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvctl.views.screen import Cell, Column, Part, Styled, TextTable, table

Item = TypeVar("Item")

LEAST = 3
"""Items from which on it is worth it."""


def differing(items: Sequence[Item], *columns: Column[Item], whole: bool = False) -> list[Part]:
    """One item a line. The first column always stands, and all of them where the table is to be ``whole``."""
    made = table(items, *columns)
    if whole or len(made.rows) < LEAST:
        return [made]
    cells = [{_plain(row[at]) for row in made.rows} for at in range(len(made.headers))]
    alike = [at for at in range(1, len(made.headers)) if len(cells[at]) == 1]
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
    return [f"all {len(made.rows)}: {shared}", "", slim] if shared else [slim]


def _plain(cell: Cell) -> str:
    return cell.text if isinstance(cell, Styled) else cell
