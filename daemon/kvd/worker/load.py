"""One load on its way: the order, the transfers it consists of, and its times."""

from __future__ import annotations

import enum
import threading
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
class LoadClaim:
    """How a load's claim stands, when that became known, and why nothing of the load may be used."""

    standing: Standing = Standing.CONFIRMED
    answered: float = 0.0
    refused: Cause | None = None

    def stands(self, standing: Standing, refused: Cause | None = None, ago: float = 0.0) -> bool:
        """It stands like this from now on, refused for that cause. False where `FOLLOWS` rules that out.

        That became known so many seconds ``ago``.
        """
        if standing not in FOLLOWS[self.standing]:
            return False
        if self.standing is Standing.OPEN and standing is not Standing.FORGONE:
            self.answered = time.monotonic() - ago
        self.standing, self.refused = standing, refused
        return True


@dataclass(slots=True, eq=False)
class LoadTimes:
    """When a load was received, planned, posted and so on, in time.monotonic() seconds; 0 for what did not happen.

    ``planned`` is when its first piece was compiled, after ``planning_seconds`` in which nothing could be posted.
    ``posting`` is when its last post began, ``posted`` when all of that was under way; backends prepared what they
    posted for ``preparing_seconds``. Asking for its peer took ``handshake_seconds``. ``reported`` is when the step
    could have it.
    """

    received: float
    handshake_seconds: float = 0.0
    planning_seconds: float = 0.0
    planned: float = 0.0
    posting: float = 0.0
    preparing_seconds: float = 0.0
    posted: float = 0.0
    ended: float = 0.0
    reported: float = 0.0


@dataclass(slots=True, eq=False)
class LoadPiece:
    """Tokens ``begin`` to ``end`` of a load's prompt, posted and counted by itself; ``transfers`` are those of now.

    ``copies``, by position of the remote worker, are None until it is compiled: the first piece when the load is
    planned, any other right before it is first posted. What one worker supplies of a page is another thing
    (`kvd.topology.sources.Piece`).
    """

    begin: int
    end: int
    copies: dict[int, Copies] | None = None
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LoadPieces:
    """What a load copies, once it is planned: ``all`` pieces, in the order of their tokens.

    The first ``done`` of them came in time. ``local`` and ``remote`` are the order's blocks.
    """

    plan: Plan | None = None
    local: Mapping[int, BlockList] = field(default_factory=dict)
    remote: Mapping[int, BlockList] = field(default_factory=dict)
    all: list[LoadPiece] = field(default_factory=list)
    done: int = 0

    @property
    def left(self) -> list[LoadPiece]:
        """Those that have not come."""
        return self.all[self.done :]

    @property
    def copies(self) -> list[Copies]:
        """All copies, of all sources and all pieces that are compiled."""
        return [copies for piece in self.all for copies in (piece.copies or {}).values()]

    @property
    def transfers(self) -> list[Transfer]:
        """All transfers, of all pieces."""
        return [transfer for piece in self.all for transfer in piece.transfers]

    @property
    def due(self) -> float:
        """When all that is under way should be over; 0 where no lane can tell of some of it."""
        waiting = [transfer.due for transfer in self.transfers if transfer.state is State.PENDING]
        return max(waiting, default=0.0) if all(waiting) else 0.0


@dataclass(slots=True, eq=False)
class Load:
    """A load order with what became of it. Times are time.monotonic() seconds.

    ``failures`` counts the lanes on which this load failed, and ``complain_at`` is when the log next says that it is
    stuck. A load that is part of something larger brings its ``pieces``, and ``then`` is told of its end.
    ``lost``: the peer has nothing to read any more. ``dropped`` says why nobody waits for it any more. With a ``fault``
    this worker's part of it is to miss. ``sums``: the prefiller has checksums of what it pushed; ``checksum`` is what
    came of comparing them. ``under_way`` is set once all of a pull is posted, else at its end.
    """

    order: LoadOrder
    times: LoadTimes
    deadline: float
    claim: LoadClaim = field(default_factory=LoadClaim)
    pieces: LoadPieces = field(default_factory=LoadPieces)
    then: Callable[[Load], None] | None = None
    failures: int = 0
    complain_at: float = 0.0
    cause: Cause | None = None
    lost: bool = False
    dropped: Cause | None = None
    fault: Fault | None = None
    sums: bool = False
    checksum: ChecksumResult = field(default_factory=ChecksumResult)
    under_way: threading.Event = field(default_factory=threading.Event)

    @property
    def once(self) -> bool:
        """Whether it cannot be read again: a step runs behind what was posted of it."""
        return self.order.in_step and self.under_way.is_set()

    def drop(self, cause: Cause) -> None:
        """Nobody waits for it any more; the first cause counts."""
        self.dropped = self.dropped or cause

    def end(self, cause: Cause | None) -> None:
        """It is over: a miss with a cause, else complete."""
        self.cause, self.times.ended = cause, time.monotonic()
        if cause is None and self.order.in_step:  # nobody looked before its step was over
            self.times.ended = max((one.ended for one in self.pieces.transfers), default=self.times.ended)
        self.under_way.set()

    def spoil(self, cause: Cause) -> None:
        """It has come and is not what it should be: a miss of which nothing may be used or claimed again."""
        self.cause, self.pieces.done = cause, 0

    @property
    def seconds(self) -> float:
        """How long it may take."""
        return self.deadline - self.times.received

    @property
    def good(self) -> int:
        """Tokens of the prompt up to which a load that missed has come all the same; what was here before counts."""
        whole = min(self.pieces.done, len(self.pieces.all) - 1)
        return self.pieces.all[whole - 1].end if whole > 0 else self.order.computed

    @property
    def bad_blocks(self) -> set[int]:
        """Local blocks that hold nothing good after a miss."""
        plan = self.pieces.plan
        if plan is None or not self.pieces.done:
            return self.order.block_ids
        sizes, good = plan.block_sizes, self.good
        return {
            block
            for group, (first, ids) in self.order.groups.items()
            for block in ids[max(0, good // sizes[group] - first) :]
        }

    @property
    def prefix(self) -> int:
        """Tokens that may be claimed again after a miss (`kvd.topology.pieces.largest_prefix`), 0 for none."""
        plan = self.pieces.plan
        if plan is None or self.lost or not self.pieces.done:
            return 0
        remote = self.order.prefill.block_lists()
        return largest_prefix(plan, remote, good=self.good, tokens=self.order.tokens)


def load_of(order: LoadOrder, received: float) -> Load:
    """The load of an order that was received then."""
    claim = LoadClaim(Standing.OPEN if order.unanswered else Standing.CONFIRMED)
    return Load(order, LoadTimes(received), received + order.seconds, claim)


def clear_leftover(load: Load, plan: Plan, geometry: WorkerGeometry) -> None:
    """Zero what no copy of the load will write of its blocks, before any is under way (`kvd.topology.leftover`).

    By then the load is this thread's to end: its blocks are nobody else's. Raises `BackendError` where the memory
    cannot be zeroed: such a load must not complete.
    """
    if load.then is not None:
        return  # of a part: it was done for the whole
    order = load.order
    remote = None if order.transfer_id else load.pieces.remote
    runs = leftover(plan, load.pieces.local, remote, tokens=order.tokens, computed=order.computed)
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
    """Why a load whose time is up is a miss, nothing before; ``what`` names what it was to be by now.

    One that its own step uses is looked at once that is over: then it counts when its bytes were here.
    """
    at, transfers = time.monotonic(), load.pieces.transfers
    if load.order.in_step and transfers and all(one.state is State.DONE for one in transfers):
        at = max(one.ended for one in transfers)
    if at <= load.deadline:
        return None
    return Cause(f"not {what} within its {load.seconds:.1f} s", "TOO_LATE")
