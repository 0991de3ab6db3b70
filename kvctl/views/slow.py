"""The Slow document: what `kvctl slow` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.cli.units import Count, Time
from kvctl.ledger.slow_findings import SlowFinding, find
from kvctl.ledger.slow_pairs import SlowPair, by_pair, slow_pair
from kvctl.views.registry import View, moment
from kvctl.views.screen import Indented, Part, Styled, TextTable
from kvd.wire.transfer import TransferList


class Slow(Struct, frozen=True, kw_only=True):
    """What transfers spent their time on, pair by pair, most time first."""

    total: Annotated[int, Meta(ge=0, description="transfers in the ledger, matching or not")]
    looked_at: Count
    more: Annotated[bool, Meta(description="older ones match as well and were not looked at")]
    oldest: Time | None
    newest: Time | None
    pairs: tuple[SlowPair, ...]
    findings: tuple[SlowFinding, ...]


def slow_document(answer: TransferList) -> Slow:
    """What the rows say."""
    records = by_pair(answer.rows)
    pairs = sorted(map(slow_pair, records, records.values()), key=lambda p: -p.seconds_p50 * p.transfers)
    starts = [row.record.started for row in answer.rows]
    return Slow(
        total=answer.total,
        looked_at=len(answer.rows),
        more=answer.more,
        oldest=moment(min(starts)) if starts else None,
        newest=moment(max(starts)) if starts else None,
        pairs=tuple(pairs),
        findings=find(pairs, records),
    )


def slow_screen(body: Slow, wide: bool) -> Part:
    """One pair a line, then the findings; when wide, each stage's times as well."""
    if body.oldest is None or body.newest is None:
        return f"no transfer matches; the ledger has {body.total}"
    older = ", older ones match as well: --last looks at more" if body.more else ""
    lines: list[Part] = [
        f"{body.looked_at} transfers from {clock(body.oldest)} to {clock(body.newest)}{older}",
        "",
        _table(body, wide),
    ]
    if wide:
        lines += ["", _stages(body)]
    for finding in body.findings:
        severity = Styled(finding.severity, "yellow" if finding.severity == "warning" else "cyan")
        lines += [
            "",
            (severity, f" {finding.code} ({finding.pair}): {finding.message}"),
            Indented(finding.hint),
        ]
    if not body.findings:
        lines += ["", "nothing stands out"]
    return lines


def _table(body: Slow, wide: bool) -> Part:
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
    return TextTable(headers, rows, right="TRANSFERS MISSES P50 P99 RATE RETRIED COPIES BYTES/COPY")


def _spent(pair: SlowPair) -> str:
    """``wire 80%, post 12%``: stages that take a twentieth or more, largest first."""
    shown = sorted((s for s in pair.stages if s.share >= 0.05), key=lambda s: -s.share)
    return ", ".join(f"{s.stage} {s.share:.0%}" for s in shown) or "-"


def _stages(body: Slow) -> Part:
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
    return TextTable(["FROM", "TO", "STAGE", "SHARE", "P50", "P99"], rows, right="SHARE P50 P99")


VIEWS = (View(Slow, slow_screen, "pairs", SlowPair),)
