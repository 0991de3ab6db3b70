"""Loads as the ledger keeps them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvd.client.records import block_runs
from kvd.geometry.model import WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.plan import Plan
from kvd.wire.transfer import OTHER, GroupShare, TransferRecord
from kvd.worker.cause import code_of, text_of
from kvd.worker.load import Load
from kvd.worker.orders import block_lists


def record(load: Load, *, engine_id: str, backend: str, geometry: WorkerGeometry) -> TransferRecord:
    """The load of the worker of that engine that has this geometry; of a push `kvd.worker.push.arrival` knows more.

    Bytes, coalesced descriptors and remote ranks are of the pieces that were compiled, which are not all where a load
    ended before; blocks, groups and descriptors are of all that it was to fill.
    """
    order, pieces, times = load.order, load.pieces, load.times
    plan = pieces.plan
    local, remote = block_lists(order.groups), order.prefill.block_lists()
    ended = [t.ended for t in pieces.transfers if t.ended]
    stages = {
        "queued": max(0.0, times.received - order.claimed),
        "handshake": times.handshake_seconds + order.handshake_seconds,
        "plan": times.planning_seconds,
        "post": max(0.0, times.posted - times.posting) if times.posting else 0.0,
        "wire": max(0.0, times.ended - times.posted) if times.posted else 0.0,
        **_claim(load),
    }
    sources = sorted({index for piece in pieces.all for index in piece.copies or ()}) if plan else []
    return TransferRecord(
        transfer_id=f"{order.request_id}@{geometry.rank}" + (f"#{order.again + 1}" if order.again else ""),
        request_id=order.request_id,
        local_engine=engine_id,
        local_rank=str(geometry.rank),
        remote_engine=order.prefill.engine_id,
        remote_generation=order.prefill.generation,
        remote_request_id=order.transfer_id or order.prefill.request_id,
        backend=next((t.backend for t in pieces.transfers if t.backend), backend),
        mode="push" if order.transfer_id else "pull",
        state="miss" if load.cause else "done",
        cause=text_of(load.cause),
        code=code_of(load.cause),
        started=time.time() - (time.monotonic() - times.received),
        tokens=order.tokens,
        bytes=sum(copies.nbytes for copies in pieces.copies),
        descriptors=_uncoalesced(plan, local) if plan else 0,
        coalesced_descriptors=sum(copies.runs for copies in pieces.copies),
        remote_ranks=tuple(str(plan.remote_ranks[i]) for i in sources) if plan else (),
        groups=_group_shares(local, plan, geometry),
        stages=with_other(load, stages),
        attempts=load.failures + (not load.cause),
        local_blocks=block_runs(local),
        remote_blocks=block_runs(remote),
        moments=moments(
            load,
            handshake=times.received + times.handshake_seconds if times.handshake_seconds else 0.0,
            planned=times.planned,
            posting=times.posting,
            posted=times.posted,
            first=min(ended, default=0.0),
            last=max(ended, default=0.0),
            answered=load.claim.answered,
        ),
        checksum=load.checksum,
        traceparent=order.traceparent,
        prefix=order.checked,
    )


def with_other(load: Load, stages: dict[str, float]) -> dict[str, float]:
    """The stages, and as the last one the time between them: all together they are what the load took."""
    whole = load.times.ended - load.order.claimed + load.order.handshake_seconds + stages.get("claim", 0.0)
    return stages | {OTHER: max(0.0, whole - sum(stages.values()))}


def _claim(load: Load) -> dict[str, float]:
    """How long a load that had ended waited for the answer on its claim; nothing where it began after that."""
    return {"claim": max(0.0, load.claim.answered - load.times.ended)} if load.order.unanswered else {}


def moments(load: Load, **times: float) -> dict[str, float]:
    """What happened when, in seconds after the order was received; ``times`` are 0 for what did not.

    A load that its own step uses is reported to none.
    """
    received, reported = load.times.received, load.times.reported or time.monotonic()
    all_times = {"queued": load.order.claimed, **times, "reported": 0.0 if load.order.in_step else reported}
    return {name: at - received for name, at in all_times.items() if at}


def _uncoalesced(plan: Plan, local: Mapping[int, BlockList]) -> int:
    """Descriptors that one entry for each block and segment would have made."""
    return sum(
        len(r.layers) * r.layer_segments * -(-len(local[r.group].ids) // r.phase.local_period)
        for r in plan.reads
        if r.group in local
    )


def _group_shares(
    local: Mapping[int, BlockList], plan: Plan | None, geometry: WorkerGeometry
) -> tuple[GroupShare, ...]:
    """Blocks and bytes of each group that a load fills on this worker; nothing before it was planned."""
    if plan is None:
        return ()
    shares = []
    for group in geometry.groups:
        blocks = local.get(group.index)
        if blocks is None or not len(blocks.ids):
            continue
        content = sum(layer.page.content for layer in group.layers)
        shares.append(GroupShare(group.index, group.kind, len(blocks.ids), content * len(blocks.ids)))
    return tuple(shares)
