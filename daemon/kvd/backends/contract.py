"""The backend contract: what a transfer engine must offer, and nothing about any one of them.

Three roles. A `Backend` holds a worker's registered memory and is what peers read from; it lives as long as the worker.
A `Lane` is this worker's way to *one* peer engine: cheap to make, and made anew when a transfer on it is given up. A
`Window` is the same for what one peer engine *writes* here. Memory that vLLM may reuse must never be the target of a
transfer that might still write. This rule rests on one promise of both: when `close` has returned, nothing of that lane
or window can land any more. How an adapter keeps it (destroying the agent, never calling into it again, waiting for the
copy) is its own affair.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Selection

Operation = Literal["read", "write"]


class State(enum.Enum):
    """Of a submitted transfer.

    FAILED is final for the transfer, not for its bytes: close the lane before reusing memory.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Traits:
    """What a backend is good at, and what the connector must know of it.

    ``synchronous``: a post may block its thread until the bytes have moved. ``strided_lists``: its lanes are
    `SelectingLane`, and numbers of cells are worth more to it than many addresses. ``block_lists``: so are numbers of
    blocks (`BlockSelection`), and more than either. ``least_piece``: a load is posted in a piece for every so many
    bytes at most, as a smaller one would be here before the next is planned and posted. ``lands``: its backends are
    `WindowBackend`, so a peer may write here; where they are not, layer-wise push is a layer-wise read.
    """

    synchronous: bool = False
    strided_lists: bool = False
    block_lists: bool = False
    least_piece: int = 0
    lands: bool = False


@dataclass(slots=True)
class Transfer:
    """One submitted transfer.

    Fields beyond ``handle`` are for people and ledgers; times are time.monotonic() seconds. ``backend`` names what
    moves the bytes where the `Backend` stands for several. ``due`` is when it should be over, where the lane can tell:
    a good time to look.
    """

    peer: str
    bytes: int
    descriptors: int
    handle: Any
    state: State = State.PENDING
    reason: str = ""
    posted: float = 0.0
    due: float = 0.0
    ended: float = 0.0
    backend: str = ""
    detail: dict[str, float] = field(default_factory=dict)

    def end(self, reason: str = "") -> None:
        """Note that it is over: FAILED for a reason, DONE without one."""
        self.state = State.FAILED if reason else State.DONE
        self.reason, self.ended = reason, time.monotonic()


@dataclass(frozen=True, slots=True)
class Holding:
    """What a lane holds of one worker of the peer engine, which it knows as ``peer``.

    ``nbytes`` in ``regions`` are that worker's registered memory, which the lane can reach. ``mapped`` are the bytes of
    it that are mapped into this process. They stay allocated when their owner ends, until the lane is closed. None: the
    transfer engine maps by itself, and does not say what. ``ended``: the peer's process is seen to have ended.
    """

    peer: str
    regions: int
    nbytes: int
    mapped: int | None = None
    ended: bool = False

    def joined(self, other: Holding) -> Holding:
        """What two lanes hold of one worker, which is the same memory; mapped twice it is allocated once."""
        known = [one.mapped for one in (self, other) if one.mapped is not None]
        mapped = max(known) if len(known) == 2 else None
        largest = max(self, other, key=lambda one: one.nbytes)
        return Holding(self.peer, largest.regions, largest.nbytes, mapped, self.ended or other.ended)


class Lane(Protocol):
    """The way to one peer engine.

    Used from one thread at a time; calls may block that thread for as long as a copy takes.
    """

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker of the peer engine reachable under the name ``peer``.

        Idempotent for equal metadata.

        Raises `BackendError` subclasses (`PeerMetadataError`, `WorkerUnreachable`).
        """

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Start copying.

        Raises `BackendError` subclasses where it could not be started; nothing moves then.
        """

    def poll(self, transfer: Transfer) -> State:
        """Look once, without blocking, and update ``transfer``.

        Never raises for a failed transfer: FAILED and a reason.
        """

    def close(self) -> None:
        """End the lane.

        When this returns, no byte of any of its transfers can land here any more. Idempotent. What it was still
        writing may land at the peer for as long as the peer keeps its window.
        """


@runtime_checkable
class SelectingLane(Lane, Protocol):
    """A lane that prepares a plan's rows over all blocks once, and then takes the numbers of cells to copy.

    Everything else is as with `Lane`: states, errors, and what `close` promises.
    """

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        """Start copying cells of a grid; the lane keeps what it prepared for ``selection.grid`` until its end.

        Raises `BackendError` subclasses where it could not be started; nothing moves then.
        """


def takes_selections(lane: Lane) -> TypeGuard[SelectingLane]:
    """Whether a lane is a `SelectingLane`: for every transfer, where `isinstance` with a protocol takes 25 us."""
    return hasattr(lane, "submit_selection")


@runtime_checkable
class OrderedLane(Lane, Protocol):
    """A lane whose transfers the device makes by itself, so that its streams can be put behind them.

    Host memory has no streams: there the transfer is over when `precede` returns. Such a lane's `poll` is for any
    thread, too: a step looks itself for what it runs behind.
    """

    def precede(self, transfer: Transfer, stream: int) -> None:
        """Have the device do what is queued on ``stream``, its own handle, from now on after the transfer.

        Does not wait for the device; for any thread. Of a transfer that fails, this says nothing. Raises `BackendError`
        where the device does not take it.
        """


def orders_streams(lane: Lane | None) -> TypeGuard[OrderedLane]:
    """Whether a lane is an `OrderedLane` as it is now: one that stands for several goes by what was chosen."""
    return hasattr(lane, "precede")


def holdings_of(lane: Lane) -> tuple[Holding, ...]:
    """What a lane holds of its peers, for people; nothing of one that does not say. Never waits; for any thread."""
    holdings = getattr(lane, "holdings", None)
    found: tuple[Holding, ...] = holdings() if holdings is not None else ()
    return found


def serving_threads(backend: Backend) -> frozenset[int]:
    """The system's ids of this process's threads that move bytes for peers, as far as the backend tells.

    Known once memory is registered.
    """
    serving: frozenset[int] = getattr(backend, "serving", frozenset())
    return serving


def traits_of(backend: Backend, lane: Lane | None) -> Traits:
    """Those of what moves a lane's bytes: a lane of a backend that stands for several has traits of its own."""
    traits: Traits = getattr(lane, "traits", backend.traits)
    return traits


class Backend(Protocol):
    """A worker's registered memory, to be read by peers, and the maker of its lanes."""

    name: str

    @property
    def traits(self) -> Traits:
        """What it is good at."""

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory.

        Once, before `metadata` and `lane`. Raises `RegistrationError` naming the region and the cause.
        """

    def metadata(self) -> bytes:
        """What a peer's `Lane.add` needs."""

    def lane(self, name: str) -> Lane:
        """A fresh lane, with the same memory registered."""

    def close(self) -> None:
        """Deregister and destroy, all lanes first. Idempotent."""


class Window(Protocol):
    """What one peer engine writes into: the worker's memory, under a name of its own that can be taken away.

    Used from one thread at a time.
    """

    def metadata(self) -> bytes:
        """What the writing peer's `Lane.add` needs; good until `close`."""

    def progress(self) -> None:
        """Let bytes land, for transports that need their target's help. Quick; called every few 100 us by its owner.

        An adapter whose engine lands bytes by itself does nothing here.
        """

    def close(self) -> None:
        """End the window.

        When this returns, no byte that a peer writes through it can land any more, whatever the peer does or did: it
        may be stopped, and go on later. The peer's process survives this. Idempotent.
        """


@runtime_checkable
class WindowBackend(Backend, Protocol):
    """A backend that peers may write to."""

    def window(self, name: str) -> Window:
        """A fresh window over all registered memory, for one peer engine.

        Raises `RegistrationError` where nothing is registered yet, `BackendUnavailable` where none can be made.
        """


@runtime_checkable
class StagingBackend(Backend, Protocol):
    """A backend whose peers read a copy of its memory, as it was when it was last staged."""

    def stage(self, rows: Descriptors) -> None:
        """Copy memory to where peers read it; both addresses of a row are of registered memory, and the same.

        Returns when it is there. May be called on any thread. Raises `BackendError` where it cannot be copied.
        """
