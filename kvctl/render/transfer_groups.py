"""Draws the TransferGroups document."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import rate, size, span
from kvctl.views.table import column_table
from kvctl.views.transfers.groups import TransferGroups


def transfer_groups_screen(body: TransferGroups, wide: bool) -> RenderableType:  # noqa: ARG001 (as all screens)
    """One group a line, most transfers first; a line below says when there were more than were looked at."""
    headers = [body.by.upper(), "TRANSFERS", "MISSES", "BYTES", "P50", "P99", "RATE"]
    rows = [
        [
            group.key,
            str(group.transfers),
            str(group.misses),
            size(group.bytes),
            span(group.seconds_p50),
            span(group.seconds_p99),
            rate(group.bytes_per_second),
        ]
        for group in body.groups
    ]
    table = column_table(headers, rows, right="TRANSFERS MISSES BYTES P50 P99 RATE")
    if not body.more:
        return table
    return Group(table, Text(""), Text(f"the newest {body.counted} of {body.total}; --last looks at more"))
