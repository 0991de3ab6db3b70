"""The WholeTransfer document: what `kvctl transfer` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.fields import Bytes, Count, Seconds, Time
from kvctl.views.registry import moment
from kvctl.views.transfers.document import Transfer, transfer_document
from kvd.wire.transfer import LedgerRow, TransferRecord, TransferState


class WholeTransfer(Struct, frozen=True, kw_only=True):
    """One request's transfer: the parts of all workers of the engine that loaded it."""

    request_id: str
    remote_request_id: str
    local_engine: str
    local_generation: str
    remote_engine: str
    remote_generation: str
    mode: str
    state: Annotated[TransferState, Meta(description="a miss on any worker is a miss")]
    cause: str
    code: Annotated[str, Meta(description="the cause in one word (docs/transfers.md)")]
    started: Annotated[Time, Meta(description="when the first worker was given it")]
    seconds: Annotated[Seconds, Meta(description="from the scheduler's claim to the last worker's end")]
    tokens: Count
    bytes: Bytes
    parts: Annotated[tuple[Transfer, ...], Meta(description="one for each worker, by rank")]


def whole_transfer(newest: LedgerRow, rows: Iterable[LedgerRow]) -> WholeTransfer:
    """The transfer that ``newest`` is a part of; ``rows`` are all of its request, older attempts among them."""
    record = newest.record
    parts: dict[str, LedgerRow] = {}
    for row in (newest, *sorted(rows, key=lambda row: -row.seq)):
        if _attempt(row.record) == _attempt(record):
            parts.setdefault(row.record.local_rank, row)
    records = [row.record for row in parts.values()]
    missed = next((r for r in records if r.state == "miss"), None)
    began = min(r.started - r.stages.get("queued", 0.0) for r in records)
    ended = max(r.started + _end(r) for r in records)
    return WholeTransfer(
        request_id=record.request_id,
        remote_request_id=record.remote_request_id,
        local_engine=record.local_engine,
        local_generation=record.local_generation,
        remote_engine=record.remote_engine,
        remote_generation=record.remote_generation,
        mode=record.mode,
        state="miss" if missed else "done",
        cause=missed.cause if missed else "",
        code=missed.code if missed else "",
        started=moment(min(r.started for r in records)),
        seconds=max(0.0, ended - began),
        tokens=record.tokens,
        bytes=sum(r.bytes for r in records),
        parts=tuple(transfer_document(parts[rank]) for rank in sorted(parts, key=lambda r: (len(r), r))),
    )


def _end(record: TransferRecord) -> float:
    """Seconds after ``started`` at which the last bytes were there, or the miss was known."""
    rest = sum(seconds for name, seconds in record.stages.items() if name != "queued")
    return record.moments.get("last", rest) if record.state == "done" else rest


def _attempt(record: TransferRecord) -> tuple[str, ...]:
    return (
        record.request_id,
        record.remote_request_id,
        record.local_engine,
        record.local_generation,
        record.remote_generation,
    )
