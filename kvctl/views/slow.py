"""The Slow document: what `kvctl slow` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock, counted, rate, size, span
from kvctl.cli.units import Count, Time
from kvctl.ledger.slow_findings import SlowFinding, find
from kvctl.ledger.slow_pairs import SlowPair, by_pair, slow_pair
from kvctl.views.registry import View, moment
from kvctl.views.screen import Column, Indented, ScreenPart, Styled, number, table
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


def slow_screen(body: Slow, wide: bool) -> ScreenPart:
    """One pair a line, then the findings; when wide, each stage's times as well."""
    if body.oldest is None or body.newest is None:
        return f"none of {body.total} transfers matches" if body.total else "the ledger holds no transfer yet"
    older = ", older ones match as well: --last looks at more" if body.more else ""
    lines: list[ScreenPart] = [
        f"{counted(body.looked_at, 'transfer')} from {clock(body.oldest)} to {clock(body.newest)}{older}",
        "",
        table(body.pairs, *pair_columns(wide)),
    ]
    if wide:
        lines += ["", _stages(body)]
    return lines + findings_screen(body.findings)


def findings_screen(findings: Sequence[SlowFinding]) -> list[ScreenPart]:
    """What is worth doing, each with its hint; a word where there is nothing."""
    lines: list[ScreenPart] = []
    for finding in findings:
        severity = Styled(finding.severity, "yellow" if finding.severity == "warning" else "cyan")
        lines += [
            "",
            (severity, f" {finding.code} ({finding.pair}): {finding.message}"),
            Indented(finding.hint),
        ]
    return lines or ["", "nothing stands out"]


def pair_columns(wide: bool) -> list[Column[Any]]:
    """The columns of pairs of engines, who was read from first."""
    return [
        Column("FROM", lambda pair: pair.remote_engine),
        Column("TO", lambda pair: pair.local_engine),
        Column("BACKEND", lambda pair: pair.backend),
        Column("MODE", lambda pair: pair.mode),
        number("TRANSFERS", lambda pair: pair.transfers),
        number("MISSES", lambda pair: pair.misses),
        number("P50", lambda pair: span(pair.seconds_p50)),
        number("P99", lambda pair: span(pair.seconds_p99)),
        number("RATE", lambda pair: rate(pair.bytes_per_second)),
        Column("SPENT ON", _spent),
        number("RETRIED", lambda pair: pair.retried, wide),
        number("COPIES", lambda pair: pair.descriptors_p50, wide),
        number("BYTES/COPY", lambda pair: size(pair.bytes_per_descriptor), wide),
    ]


def _spent(pair: SlowPair) -> str:
    """``wire 80%, post 12%``: stages that take a twentieth or more, largest first."""
    shown = sorted((s for s in pair.stages if s.share >= 0.05), key=lambda s: -s.share)
    return ", ".join(f"{s.stage} {s.share:.0%}" for s in shown) or "-"


def _stages(body: Slow) -> ScreenPart:
    return table(
        ((pair, stage) for pair in body.pairs for stage in pair.stages),
        Column("FROM", lambda row: row[0].remote_engine),
        Column("TO", lambda row: row[0].local_engine),
        Column("STAGE", lambda row: row[1].stage),
        number("SHARE", lambda row: f"{row[1].share:.0%}"),
        number("P50", lambda row: span(row[1].seconds_p50)),
        number("P99", lambda row: span(row[1].seconds_p99)),
    )


VIEWS = (View(Slow, slow_screen, "pairs", SlowPair),)
