"""One load on its way: the order, its plan applied, the transfers it consists of, and its times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvd.backends import zeroing
from kvd.backends.contract import Lane, State, Traits, Transfer, takes_selections
from kvd.client.records import block_runs
from kvd.geometry.model import WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies, compile_request
from kvd.topology.leftover import leftover
from kvd.topology.pieces import cut, largest_prefix, piece
from kvd.topology.plan import Plan
from kvd.wire.transfer import ChecksumResult, GroupShare, TransferRecord, bounded
from kvd.worker.cause import Cause, code_of, text_of
from kvd.worker.orders import Fault, LoadOrder

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Slice:
    """A piece of a load, tokens ``begin`` to ``end`` of the prompt; ``transfers`` are those of now.

    ``copies``, by position of the remote worker, are None until it is compiled: the first piece when the load is
    planned, any other right before it is first posted.
    """

    begin: int
    end: int
    copies: dict[int, Copies] | None = None
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Load:
    """A load order with what became of it. Times are time.monotonic() seconds.

    ``planned`` is how long nothing could be posted for planning, ``planned_at`` when the first slice was compiled,
    ``prepared`` how long backends prepared what they then posted.
    ``local`` and ``remote`` are the order's blocks, once it is planned. ``slices`` are its pieces in the order of their
    tokens, of which the first ``pieces_done`` came in time.

    ``failures`` counts the lanes on which this load failed, and ``complain_at`` is when the log next says that it is
    stuck. A load that is part of something larger brings its ``plan`` and ``slices``, and ``then`` is told of its end.
    ``lost``: the peer has nothing to read any more. ``dropped`` says why nobody waits for it any more. With a ``fault``
    this worker's part of it is to miss. ``sums``: the prefiller has checksums of what it pushed; ``checksum`` is what
    came of comparing them.
    """

    order: LoadOrder
    received: float
    deadline: float
    handshake: float = 0.0
    planned: float = 0.0
    planned_at: float = 0.0
    posting: float = 0.0
    prepared: float = 0.0
    posted: float = 0.0
    ended: float = 0.0
    local: Mapping[int, BlockList] = field(default_factory=dict)
    remote: Mapping[int, BlockList] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    pieces_done: int = 0
    failures: int = 0
    complain_at: float = 0.0
    plan: Plan | None = None
    cause: Cause | None = None
    lost: bool = False
    dropped: Cause | None = None
    fault: Fault | None = None
    then: Callable[[Load], None] | None = None
    sums: bool = False
    checksum: ChecksumResult = field(default_factory=ChecksumResult)

    @property
    def copies(self) -> list[Copies]:
        """All copies, of all sources and all slices that are compiled."""
        return [copies for slice_ in self.slices for copies in (slice_.copies or {}).values()]

    @property
    def transfers(self) -> list[Transfer]:
        """All transfers, of all slices."""
        return [transfer for slice_ in self.slices for transfer in slice_.transfers]

    def end(self, cause: Cause | None) -> None:
        """It is over: a miss with a cause, else complete."""
        self.cause, self.ended = cause, time.monotonic()

    def spoil(self, cause: Cause) -> None:
        """It has come and is not what it should be: a miss of which nothing may be used or claimed again."""
        self.cause, self.pieces_done = cause, 0

    @property
    def good(self) -> int:
        """Tokens of the prompt up to which a load that missed has come all the same; what was here before counts."""
        whole = min(self.pieces_done, len(self.slices) - 1)
        return self.slices[whole - 1].end if whole > 0 else self.order.computed

    @property
    def bad_blocks(self) -> set[int]:
        """Local blocks that hold nothing good after a miss."""
        if self.plan is None or not self.pieces_done:
            return self.order.block_ids
        sizes, good = self.plan.block_sizes, self.good
        return {
            block
            for group, (first, ids) in self.order.groups.items()
            for block in ids[max(0, good // sizes[group] - first) :]
        }

    @property
    def prefix(self) -> int:
        """Tokens that may be claimed again after a miss (`kvd.topology.pieces.largest_prefix`), 0 for none."""
        if self.plan is None or self.lost or not self.pieces_done:
            return 0
        remote = self.order.prefill.block_lists()
        return largest_prefix(self.plan, remote, good=self.good, tokens=self.order.tokens)


def apply_plan(load: Load, plan: Plan, traits: Traits, *, piece_bytes: int) -> None:
    """Cut the load into slices and compile the first one; `post` compiles the others.

    There is a slice for every ``piece_bytes``, or for so many more as make a piece worth while to the backend (`cut`).
    Raises `TopologyError` where the blocks of the first slice do not fit.
    """
    began = time.monotonic()
    order = load.order
    load.local, load.remote = order.block_lists(), order.prefill.block_lists()
    ends = cut(plan, load.local, tokens=order.tokens, least=max(piece_bytes, traits.least_piece))
    load.slices = [Slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
    _compiled(load, load.slices[0], plan, traits)
    load.plan = plan
    load.planned_at = time.monotonic()
    load.planned = load.planned_at - began


def post(load: Load, lane: Lane, plan: Plan, traits: Traits) -> None:
    """Submit all transfers of the load on a lane, slice after slice; slices that have come already have none.

    A slice that was not compiled before is now, while the bytes of those before it move.

    Raises `BackendError`, and `TopologyError` where the blocks of a slice do not fit; what was posted before that
    stands in the slices' ``transfers``.
    """
    load.posting = time.monotonic()
    for slice_ in load.slices[load.pieces_done :]:
        for index, copies in _compiled(load, slice_, plan, traits).items():
            begun = time.monotonic()
            for transfer in submitted(lane, str(plan.remote_ranks[index]), copies):
                slice_.transfers.append(transfer)
                load.prepared += max(0.0, transfer.posted - begun)
                begun = time.monotonic()
    load.posted = time.monotonic()


def clear_leftover(load: Load, plan: Plan, geometry: WorkerGeometry) -> None:
    """Zero what no copy of the load will write of its blocks, before any is under way (`kvd.topology.leftover`).

    By then the load is this thread's to end: its blocks are nobody else's. Raises `BackendError` where the memory
    cannot be zeroed: such a load must not complete.
    """
    order = load.order
    remote = None if order.transfer_id else load.remote
    runs = leftover(plan, load.local, remote, tokens=order.tokens, computed=order.computed)
    zeroing.zero(geometry.regions, runs)


def _compiled(load: Load, slice_: Slice, plan: Plan, traits: Traits) -> dict[int, Copies]:
    """What a slice copies, with a selection where the backend is good at it; kept, so a new lane costs no plan."""
    if slice_.copies is None:
        tokens, blocks = load.order.tokens, load.local
        if len(load.slices) > 1:
            blocks = piece(plan, blocks, begin=slice_.begin, end=slice_.end, tokens=tokens)
        if traits.strided_lists:
            slice_.copies = compile_request(plan, blocks, load.remote, tokens=tokens)
        else:
            found = compile_plan(plan, blocks, load.remote, tokens=tokens)
            slice_.copies = {index: Copies(descriptors) for index, descriptors in found.items()}
    return slice_.copies


def submitted(lane: Lane, peer: str, copies: Copies) -> Iterator[Transfer]:
    """Submit reads of one remote worker, and give each transfer as soon as it is under way. Raises `BackendError`."""
    if len(copies.descriptors):
        yield lane.submit(peer, copies.descriptors, "read")
    if copies.selection is None:
        return
    if takes_selections(lane):
        yield lane.submit_selection(peer, copies.selection, "read")
    else:
        yield lane.submit(peer, copies.selection.descriptors(), "read")


def look(load: Load, lane: Lane) -> tuple[State, str]:
    """Poll all transfers: FAILED with a reason as soon as one failed, DONE when all are.

    Counts the slices that came: what comes after the deadline is nothing to rely on, its lease may have ended.
    """
    waiting, failed = False, ""
    for slice_ in load.slices[load.pieces_done :]:
        for transfer in slice_.transfers:
            state = transfer.state if transfer.state is not State.PENDING else lane.poll(transfer)
            if state is State.FAILED:
                failed = failed or f"{transfer.peer}: {transfer.reason}"
            waiting = waiting or state is State.PENDING
        if failed:
            return State.FAILED, failed
        if not waiting and time.monotonic() <= load.deadline:
            load.pieces_done += 1
    return (State.PENDING if waiting else State.DONE), ""


def overdue(load: Load, what: str) -> Cause | None:
    """Why a load whose time is up is a miss, nothing before; ``what`` names what it was to be by now."""
    if time.monotonic() <= load.deadline:
        return None
    return Cause(f"not {what} within its {load.deadline - load.received:.1f} s", "TOO_LATE")


def complain(load: Load, now: float, peer: str, doing: str) -> None:
    """Say that a posted load is past its deadline and cannot be ended; less and less often."""
    if now < load.complain_at:
        return
    past = now - load.deadline
    load.complain_at = now + past
    log.error(
        "load of %s from %s is %.0f s past its deadline and cannot be given up while its thread is busy %s: its bytes"
        " may still land, so its blocks stay in use and the request waits",
        load.order.request_id,
        peer,
        past,
        doing or "with others",
    )


def record(
    load: Load, *, engine_id: str, rank: str, backend: str, geometry: WorkerGeometry
) -> TransferRecord:
    """The load as the ledger keeps it.

    Bytes, coalesced descriptors and remote ranks are of the slices that were compiled, which are not all where a load
    ended before; blocks, groups and descriptors are of all that it was to fill.
    """
    order, plan, now = load.order, load.plan, load.ended
    local, remote = order.block_lists(), order.prefill.block_lists()
    sources = sorted({index for slice_ in load.slices for index in slice_.copies or ()}) if plan else []
    entry = TransferRecord(
        transfer_id=f"{order.request_id}@{rank}" + (f"#{order.again + 1}" if order.again else ""),
        request_id=order.request_id,
        local_engine=engine_id,
        local_rank=rank,
        remote_engine=order.prefill.engine_id,
        remote_generation=order.prefill.generation,
        remote_request_id=order.transfer_id or order.prefill.request_id,
        backend=next((t.backend for t in load.transfers if t.backend), backend),
        mode="push" if order.transfer_id else "pull",
        state="miss" if load.cause else "done",
        cause=text_of(load.cause),
        code=code_of(load.cause),
        started=time.time() - (time.monotonic() - load.received),
        tokens=order.tokens,
        bytes=sum(copies.nbytes for copies in load.copies),
        descriptors=_uncoalesced(plan, local) if plan else 0,
        coalesced_descriptors=sum(copies.runs for copies in load.copies),
        remote_ranks=tuple(str(plan.remote_ranks[i]) for i in sources) if plan else (),
        groups=group_shares(local, plan, geometry),
        stages={
            "queued": max(0.0, load.received - order.claimed),
            "handshake": load.handshake + order.handshake_seconds,
            "plan": load.planned,
            "post": max(0.0, load.posted - load.posting) if load.posting else 0.0,
            "wire": max(0.0, now - load.posted) if load.posted else 0.0,
        },
        attempts=load.failures + (not load.cause),
        local_blocks=block_runs(local),
        remote_blocks=block_runs(remote),
        moments=_moments(load),
        checksum=load.checksum,
    )
    return bounded(entry)


def _moments(load: Load) -> dict[str, float]:
    """What happened when, in seconds after the order was received."""
    ended = [t.ended for t in load.transfers if t.ended]
    moments = {
        "queued": load.order.claimed,
        "handshake": load.received + load.handshake if load.handshake else 0.0,
        "planned": load.planned_at,
        "posting": load.posting,
        "posted": load.posted,
        "first": min(ended, default=0.0),
        "last": max(ended, default=0.0),
        "reported": time.monotonic(),
    }
    return {name: at - load.received for name, at in moments.items() if at}


def _uncoalesced(plan: Plan, local: Mapping[int, BlockList]) -> int:
    """Descriptors that one entry for each block and segment would have made."""
    return sum(
        len(r.layers) * r.layer_segments * -(-len(local[r.group].ids) // r.phase.local_period)
        for r in plan.reads
        if r.group in local
    )


def group_shares(
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
