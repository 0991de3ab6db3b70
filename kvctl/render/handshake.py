"""Draws the HandshakeBenchmark document as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import size, span
from kvctl.views.handshake import HandshakeBenchmark
from kvctl.views.table import column_table


def handshake_screen(body: HandshakeBenchmark, wide: bool) -> RenderableType:
    """One case a line, by the sizes of the two engines."""
    headers = ["RANKS", "CASE", "P50", "P99", "ALL", "CPU", "PER-SECOND"]
    if wide:
        headers += ["P90", "ALL-P90", "ALL-P99", "ANSWER", "ROUNDS"]
    rows = []
    for row in body.measurements:
        cells = [
            f"{row.local_ranks} x {row.remote_ranks}",
            row.case,
            span(row.each.p50),
            span(row.each.p99),
            span(row.whole.p50),
            span(row.processor_seconds),
            f"{row.handshakes_per_second:.0f}",
        ]
        if wide:
            cells += [span(row.each.p90), span(row.whole.p90), span(row.whole.p99)]
            cells += [size(row.bytes), str(row.rounds)]
        rows.append(cells)
    head = (
        f"handshakes of engines of {body.model} over two kvds; {body.cores} cores, load {body.load:.1f} at the"
        f" beginning, {span(body.seconds)} in all"
    )
    return Group(
        Text(head), Text(""), column_table(headers, rows, right=" ".join(set(headers) - {"RANKS", "CASE"}))
    )
