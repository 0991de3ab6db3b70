"""Draws the Kinds document."""

from __future__ import annotations

from rich.console import RenderableType

from kvctl.views.kinds import Kinds
from kvctl.views.table import column_table


def kinds_screen(body: Kinds, wide: bool) -> RenderableType:
    """One kind a line; what its items are when wide."""
    headers = ["KIND", *(["ITEMS"] if wide else []), "SUMMARY"]
    rows = [[kind.name, *([kind.items or "-"] if wide else []), kind.summary] for kind in body.kinds]
    return column_table(headers, rows)
