"""What the spans of a transfer are, on either side: made of the moments that are known of it, without a library.

Each side tells of what it sees itself, by its own clock: the decoder of its load, the prefiller of the blocks that it
kept or sent. Both are children of the span that the router or the client named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvd.service.engines.lease_entry import LeaseEntry
from kvd.wire.push import PushProgress, SentPart
from kvd.wire.transfer import TransferRecord

NAME = "kv_transfer"
RECEIVED = "received"
"""Stands for the moment that all others count from."""
KNOWN = "known"
"""Stands for the moment from which the peer was known: `RECEIVED`, or the end of the handshake."""
UNCLAIMED = "unclaimed"
"""Stands for the moment until which nobody had claimed a lease."""
Attribute = str | int | float
ChildSpan = tuple[str, str, str]
"""A child's name, and the moments at which it begins and ends."""
PULLED: Sequence[ChildSpan] = (
    ("queued", "queued", RECEIVED),
    ("handshake", RECEIVED, "handshake"),
    ("plan", KNOWN, "planned"),
    ("post", "posting", "posted"),
    ("wire", "posted", "last"),
    ("claim", "last", "answered"),
    ("report", "last", "reported"),
)
PUSHED: Sequence[ChildSpan] = (
    ("queued", "queued", RECEIVED),
    ("announce", "announced", "taken"),
    ("wait", "taken", "first"),
    ("wire", "first", "last"),
    ("report", "last", "reported"),
)
KEPT: Sequence[ChildSpan] = (("unclaimed", "opened", UNCLAIMED), ("read", "claimed", "ended"))
SENT: Sequence[ChildSpan] = (("wait", RECEIVED, "first"), ("wire", "first", "last"))


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """One side's `NAME`, a child of ``parent`` (`TraceParent`), from ``begin`` to ``end`` in Unix seconds.

    ``children`` have a name, a begin and an end each. ``error`` is why the transfer failed.
    """

    parent: str
    side: Literal["decoder", "prefiller"]
    begin: float
    end: float
    children: tuple[tuple[str, float, float], ...]
    attributes: Mapping[str, Attribute]
    error: str = ""


def of_load(record: TransferRecord) -> TransferSpan:
    """A decoding worker's load, or a miss of which only its scheduler knows."""
    pushed = record.mode == "push"
    moments = {RECEIVED: 0.0, KNOWN: record.moments.get("handshake", 0.0), **record.moments}
    attributes: dict[str, Attribute] = {
        "kv_transfer.id": record.transfer_id,
        "gen_ai.request.id": record.request_id,
        "kv_transfer.remote_request_id": record.remote_request_id,
        "kv_transfer.engine": record.local_engine,
        "kv_transfer.rank": record.local_rank,
        "kv_transfer.peer_engine": record.remote_engine,
        "kv_transfer.mode": record.mode,
        "kv_transfer.backend": record.backend,
        "kv_transfer.state": record.state,
        "kv_transfer.tokens": record.tokens,
        "kv_transfer.bytes": record.bytes,
        "kv_transfer.descriptors": record.coalesced_descriptors,
        "kv_transfer.attempts": record.attempts,
    }
    if record.code:
        attributes["kv_transfer.miss_code"] = record.code
    return _span(
        record.traceparent,
        "decoder",
        record.started,
        moments,
        PUSHED if pushed else PULLED,
        attributes,
        f"{record.code}: {record.cause}" if record.state == "miss" else "",
    )


def of_lease(lease: LeaseEntry, end: str, now: float, wall: float) -> TransferSpan:
    """What a prefiller kept, ended so just ``now`` (time.monotonic()), which is ``wall`` in Unix seconds."""
    times = {"opened": lease.opened, "claimed": lease.claimed, "ended": now}
    attributes: dict[str, Attribute] = {
        "gen_ai.request.id": lease.request_id,
        "kv_transfer.engine": lease.owner.engine.engine_id,
        "kv_transfer.mode": "pull",
        "kv_transfer.blocks": lease.blocks,
        "kv_transfer.readers": len(lease.gone),
        "kv_transfer.lease_end": end,
    }
    moments = {name: at - lease.opened for name, at in times.items() if at}
    moments[UNCLAIMED] = moments.get("claimed", moments["ended"])
    started = wall - (now - lease.opened)
    return _span(lease.traceparent, "prefiller", started, moments, KEPT, attributes)


def of_push(progress: PushProgress, sent: SentPart) -> TransferSpan:
    """What a prefilling worker sent to one decoding worker."""
    key = progress.key
    attributes: dict[str, Attribute] = {
        "kv_transfer.id": key.transfer_id,
        "gen_ai.request.id": sent.request_id,
        "kv_transfer.engine": key.prefiller,
        "kv_transfer.rank": str(progress.source),
        "kv_transfer.peer_engine": key.decoder,
        "kv_transfer.peer_rank": str(key.rank),
        "kv_transfer.mode": "push",
        "kv_transfer.attempts": key.attempt + 1,
    }
    if progress.code:
        attributes["kv_transfer.miss_code"] = progress.code
    moments = {RECEIVED: 0.0, **sent.moments}
    failed = f"{progress.code}: {progress.failed}" if progress.failed else ""
    return _span(sent.traceparent, "prefiller", sent.started, moments, SENT, attributes, failed)


def _span(
    parent: str,
    side: Literal["decoder", "prefiller"],
    started: float,
    moments: Mapping[str, float],
    steps: Sequence[ChildSpan],
    attributes: Mapping[str, Attribute],
    error: str = "",
) -> TransferSpan:
    children = tuple(_children(started, moments, steps))
    begin, end = started + min(moments.values()), started + max(moments.values())
    return TransferSpan(parent, side, begin, end, children, attributes, error)


def _children(
    started: float, moments: Mapping[str, float], steps: Sequence[ChildSpan]
) -> Iterator[tuple[str, float, float]]:
    """What happened; a step of which a moment is missing, or that ended before it began, did not."""
    for name, first, last in steps:
        if first in moments and last in moments and moments[first] <= moments[last]:
            yield name, started + moments[first], started + moments[last]
