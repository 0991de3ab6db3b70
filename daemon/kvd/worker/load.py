"""One load on its way: the order, the transfers it consists of, and its times."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvd.backends import zeroing
from kvd.backends.contract import Lane, State, Transfer, takes_selections
from kvd.geometry.model import WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.copies import Copies
from kvd.topology.leftover import leftover
from kvd.topology.pieces import largest_prefix
from kvd.topology.plan import Plan
from kvd.wire.transfer import ChecksumResult
from kvd.worker.cause import Cause
from kvd.worker.orders import Fault, LoadOrder


class Standing(enum.Enum):
    """How the claim of a load stands (`kvd.worker.pull.unanswered` for one that runs beside its claim)."""

    OPEN = "open"
    """No answer is known: nothing of the load may be used yet."""
    CONFIRMED = "confirmed"
    REFUSED = "refused"
    """Nothing of the load may be used."""
    FORGONE = "forgone"
    """Nobody will use the load, so it waits for no answer."""


FOLLOWS: Mapping[Standing, frozenset[Standing]] = {
    Standing.OPEN: frozenset({Standing.CONFIRMED, Standing.REFUSED, Standing.FORGONE}),
    # Kvd may tell of a confirmation before the scheduler says what it makes of it.
    Standing.CONFIRMED: frozenset({Standing.REFUSED}),
    Standing.REFUSED: frozenset(),
    Standing.FORGONE: frozenset(),
}
"""What may become of a claim."""


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
    came of comparing them. ``claim`` is how its claim stands, ``answered`` when that became known, and ``refused`` why
    nothing of it may be used. ``reported`` is when the step could have it.
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
    claim: Standing = Standing.CONFIRMED
    answered: float = 0.0
    reported: float = 0.0
    refused: Cause | None = None

    @property
    def copies(self) -> list[Copies]:
        """All copies, of all sources and all slices that are compiled."""
        return [copies for slice_ in self.slices for copies in (slice_.copies or {}).values()]

    @property
    def due(self) -> float:
        """When all of it that is under way should be over; 0 where no lane can tell of some of it."""
        waiting = [transfer.due for transfer in self.transfers if transfer.state is State.PENDING]
        return max(waiting, default=0.0) if all(waiting) else 0.0

    @property
    def transfers(self) -> list[Transfer]:
        """All transfers, of all slices."""
        return [transfer for slice_ in self.slices for transfer in slice_.transfers]

    def stands(self, standing: Standing, refused: Cause | None = None) -> bool:
        """Its claim stands like this from now on, refused for that cause. False where `FOLLOWS` rules that out."""
        if standing not in FOLLOWS[self.claim]:
            return False
        if self.claim is Standing.OPEN and standing is not Standing.FORGONE:
            self.answered = time.monotonic()
        self.claim, self.refused = standing, refused
        return True

    def drop(self, cause: Cause) -> None:
        """Nobody waits for it any more; the first cause counts."""
        self.dropped = self.dropped or cause

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


def load_of(order: LoadOrder, received: float) -> Load:
    """The load of an order that was received then."""
    claim = Standing.OPEN if order.unanswered else Standing.CONFIRMED
    return Load(order, received=received, deadline=received + order.seconds, claim=claim)


def clear_leftover(load: Load, plan: Plan, geometry: WorkerGeometry) -> None:
    """Zero what no copy of the load will write of its blocks, before any is under way (`kvd.topology.leftover`).

    By then the load is this thread's to end: its blocks are nobody else's. Raises `BackendError` where the memory
    cannot be zeroed: such a load must not complete.
    """
    order = load.order
    remote = None if order.transfer_id else load.remote
    runs = leftover(plan, load.local, remote, tokens=order.tokens, computed=order.computed)
    zeroing.zero(geometry.regions, runs)


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


def state_of(transfer: Transfer, lane: Lane) -> State:
    """The state of a transfer on a lane, which is asked while it is under way. Raises `BackendError`."""
    return transfer.state if transfer.state is not State.PENDING else lane.poll(transfer)


def overdue(load: Load, what: str) -> Cause | None:
    """Why a load whose time is up is a miss, nothing before; ``what`` names what it was to be by now."""
    if time.monotonic() <= load.deadline:
        return None
    return Cause(f"not {what} within its {load.deadline - load.received:.1f} s", "TOO_LATE")
