"""The Slow document: what `kvctl slow` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.views.fields import Bytes, BytesPerSecond, Count, Seconds, Time
from kvctl.views.registry import View, moment
from kvctl.views.screen import Indented, Part, Styled, Table
from kvctl.views.transfers.groups import moving, quantile
from kvd.wire.transfer import TransferList, TransferRecord

Share = Annotated[float, Meta(ge=0, le=1, description="part of the whole, 0 to 1")]


class StageTime(Struct, frozen=True, kw_only=True):
    """One stage of many transfers."""

    stage: str
    share: Share
    seconds_p50: Seconds
    seconds_p99: Seconds


class SlowPair(Struct, frozen=True, kw_only=True):
    """What the transfers of one pair of engines, backend and mode spent their time on."""

    remote_engine: str
    local_engine: str
    backend: str
    mode: str
    transfers: Count
    misses: Count
    retried: Annotated[Count, Meta(description="those that took more than one attempt")]
    bytes: Bytes
    seconds_p50: Seconds
    seconds_p99: Seconds
    bytes_per_second: Annotated[
        BytesPerSecond | None, Meta(description="the middle one of all; null of pushes")
    ]
    descriptors_p50: Annotated[Count, Meta(description="after coalescing")]
    bytes_per_descriptor: Annotated[Bytes, Meta(description="on average; 0 where it is not known")]
    dominant: Annotated[str, Meta(description="the stage with the largest share")]
    stages: Annotated[tuple[StageTime, ...], Meta(description="in the order in which they happen")]


class SlowFinding(Struct, frozen=True, kw_only=True):
    """One thing worth doing."""

    code: Annotated[str, Meta(description="stable")]
    severity: Literal["warning", "info"]
    pair: Annotated[str, Meta(description="which transfers: remote to local, backend")]
    message: str
    hint: str


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
    from kvctl.ledger.slow_findings import find

    kinds: dict[tuple[str, str, str, str], list[TransferRecord]] = {}
    for row in answer.rows:
        r = row.record
        kinds.setdefault((r.remote_engine, r.local_engine, r.backend, r.mode), []).append(r)
    pairs = [_pair(key, records) for key, records in kinds.items()]
    starts = [row.record.started for row in answer.rows]
    return Slow(
        total=answer.total,
        looked_at=len(answer.rows),
        more=answer.more,
        oldest=moment(min(starts)) if starts else None,
        newest=moment(max(starts)) if starts else None,
        pairs=tuple(sorted(pairs, key=lambda p: -p.seconds_p50 * p.transfers)),
        findings=find(pairs, kinds),
    )


def _pair(key: tuple[str, str, str, str], records: Sequence[TransferRecord]) -> SlowPair:
    stages: dict[str, list[float]] = {}
    for record in records:
        for name, seconds in record.stages.items():
            stages.setdefault(name, []).append(max(0.0, seconds))
    whole = sum(map(sum, stages.values()))
    times = [sum(r.stages.values()) for r in records]
    rates = [r.bytes / moving(r) for r in records if r.state == "done" and r.bytes and moving(r) > 0]
    descriptors = sum(r.coalesced_descriptors for r in records)
    shares = {name: sum(values) / whole if whole else 0.0 for name, values in stages.items()}
    return SlowPair(
        remote_engine=key[0],
        local_engine=key[1],
        backend=key[2],
        mode=key[3],
        transfers=len(records),
        misses=sum(r.state == "miss" for r in records),
        retried=sum(r.attempts > 1 for r in records),
        bytes=sum(r.bytes for r in records),
        seconds_p50=quantile(times, 0.5),
        seconds_p99=quantile(times, 0.99),
        bytes_per_second=quantile(rates, 0.5) if rates else None,
        descriptors_p50=int(quantile([r.coalesced_descriptors for r in records], 0.5)),
        bytes_per_descriptor=(
            sum(r.bytes for r in records if r.coalesced_descriptors) // descriptors if descriptors else 0
        ),
        dominant=max(shares, key=lambda name: shares[name]) if whole else "",
        stages=tuple(
            StageTime(
                stage=name,
                share=min(1.0, shares[name]),
                seconds_p50=quantile(values, 0.5),
                seconds_p99=quantile(values, 0.99),
            )
            for name, values in stages.items()
        ),
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
    return Table(headers, rows, right="TRANSFERS MISSES P50 P99 RATE RETRIED COPIES BYTES/COPY")


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
    return Table(["FROM", "TO", "STAGE", "SHARE", "P50", "P99"], rows, right="SHARE P50 P99")


VIEWS = (View(Slow, slow_screen, "pairs", SlowPair),)
