"""Draws the Workers document."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from kvctl.cli.numbers import age, size, span
from kvctl.views.table import column_table, state
from kvctl.views.workers import Workers


def workers_screen(body: Workers, wide: bool) -> RenderableType:
    """One process a line."""
    reasons = wide or any(worker.reason for worker in body.workers)
    headers = ["ENGINE", "RANK", "PID", "STATE", "HEARD", "BACKEND", "MEMORY"]
    if wide:
        headers += ["REGIONS", "REGISTERED", "INCARNATION"]
    if reasons:
        headers.append("REASON")
    rows: list[list[str | Text]] = []
    for worker in body.workers:
        row: list[str | Text] = [
            worker.engine_id,
            worker.rank or worker.client,
            str(worker.pid),
            state(worker.state),
            span(worker.heartbeat_age),
            worker.backend or "-",
            size(worker.registered_bytes) if worker.rank else "-",
        ]
        if wide:
            row += [str(worker.regions) if worker.rank else "-", age(worker.registered), worker.incarnation]
        if reasons:
            row.append(worker.reason or "-")
        rows.append(row)
    return column_table(headers, rows, right="PID HEARD MEMORY REGIONS REGISTERED")
