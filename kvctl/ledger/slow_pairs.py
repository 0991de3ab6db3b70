"""What the transfers of each pair of engines spend their time on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.units import Bytes, BytesPerSecond, Count, Seconds
from kvctl.ledger.statistics import moving, quantile, took
from kvd.wire.transfer import LedgerRow, TransferRecord

PairKey = tuple[str, str, str, str]
"""Remote engine, local engine, backend, mode."""
TimeShare = Annotated[float, Meta(ge=0, le=1, description="part of the whole, 0 to 1")]


class StageTime(Struct, frozen=True, kw_only=True):
    """One stage of many transfers."""

    stage: str
    share: TimeShare
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


def by_pair(rows: Iterable[LedgerRow]) -> dict[PairKey, list[TransferRecord]]:
    """The records of each pair of engines, backend and mode."""
    found: dict[PairKey, list[TransferRecord]] = {}
    for row in rows:
        r = row.record
        found.setdefault((r.remote_engine, r.local_engine, r.backend, r.mode), []).append(r)
    return found


def slow_pair(key: PairKey, records: Sequence[TransferRecord]) -> SlowPair:
    """What the records of a pair say."""
    stages: dict[str, list[float]] = {}
    for record in records:
        for name, seconds in record.stages.items():
            stages.setdefault(name, []).append(max(0.0, seconds))
    whole = sum(map(sum, stages.values()))
    times = [took(r) for r in records]
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
