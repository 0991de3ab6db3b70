"""Draws the Slow document."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.views.slow import Slow, SlowPair
from kvctl.views.table import column_table


def slow_screen(body: Slow, wide: bool) -> RenderableType:
    """One pair a line, then the findings; when wide, each stage's times as well."""
    if body.oldest is None or body.newest is None:
        return Text(f"no transfer matches; the ledger has {body.total}")
    older = ", older ones match as well: --last looks at more" if body.more else ""
    lines: list[RenderableType] = [
        Text(f"{body.looked_at} transfers from {clock(body.oldest)} to {clock(body.newest)}{older}"),
        Text(""),
        _table(body, wide),
    ]
    if wide:
        lines += [Text(""), _stages(body)]
    for finding in body.findings:
        lines.append(Text(""))
        head = Text(finding.severity, style="yellow" if finding.severity == "warning" else "cyan")
        lines.append(head.append(f" {finding.code} ({finding.pair}): {finding.message}", style="default"))
        lines.append(Text(f"  {finding.hint}"))
    if not body.findings:
        lines += [Text(""), Text("nothing stands out")]
    return Group(*lines)


def _table(body: Slow, wide: bool) -> RenderableType:
    headers = ["FROM", "TO", "BACKEND", "MODE", "TRANSFERS", "MISSES", "P50", "P99", "RATE", "SPENT ON"]
    headers += ["RETRIED", "COPIES", "BYTES/COPY"] if wide else []
    rows = []
    for pair in body.pairs:
        row = [
            pair.remote_engine,
            pair.local_engine,
            pair.backend,
            pair.mode,
            str(pair.transfers),
            str(pair.misses),
            span(pair.seconds_p50),
            span(pair.seconds_p99),
            rate(pair.bytes_per_second),
            _spent(pair),
        ]
        if wide:
            row += [str(pair.retried), str(pair.descriptors_p50), size(pair.bytes_per_descriptor)]
        rows.append(row)
    return column_table(headers, rows, right="TRANSFERS MISSES P50 P99 RATE RETRIED COPIES BYTES/COPY")


def _spent(pair: SlowPair) -> str:
    """``wire 80%, post 12%``: stages that take a twentieth or more, largest first."""
    shown = sorted((s for s in pair.stages if s.share >= 0.05), key=lambda s: -s.share)
    return ", ".join(f"{s.stage} {s.share:.0%}" for s in shown) or "-"


def _stages(body: Slow) -> RenderableType:
    rows = [
        [
            pair.remote_engine,
            pair.local_engine,
            stage.stage,
            f"{stage.share:.0%}",
            span(stage.seconds_p50),
            span(stage.seconds_p99),
        ]
        for pair in body.pairs
        for stage in pair.stages
    ]
    return column_table(["FROM", "TO", "STAGE", "SHARE", "P50", "P99"], rows, right="SHARE P50 P99")
