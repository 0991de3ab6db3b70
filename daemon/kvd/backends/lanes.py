"""What the adapters' lanes, windows and backends have in common: who is known, what is under way, what is open.

An adapter derives its lane from `EngineLane` and says how to connect, to look and to stop. All lanes are polled and
closed in one way, which is here. A lane whose transfers are those of lanes behind it derives from `PeerLane`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvd.backends.contract import Holding, Operation, State, Transfer
from kvd.backends.errors import BackendError, RegistrationError, TransferRefused
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors


class KnownPeer(Protocol):
    """A worker of the peer engine."""

    @property
    def metadata(self) -> bytes:
        """What it was added with."""


class Closing(Protocol):
    """A lane or a window."""

    def close(self) -> None:
        """As in the contract."""


PeerT = TypeVar("PeerT", bound=KnownPeer)
WorkT = TypeVar("WorkT")
ClosingT = TypeVar("ClosingT", bound=Closing)
KeptT = TypeVar("KeptT", bound=Closing)


class PeerLane(ABC, Generic[PeerT]):
    """The way to one peer engine: whom it knows, whether it is open. Calls from several threads wait for each other."""

    def __init__(self, name: str, backend: str, closed: Callable[[Any], None]) -> None:
        """``backend`` is for errors; ``closed`` is called with the lane once it is closed."""
        self.name = name
        self._backend_name = backend
        self._peers: dict[str, PeerT] = {}
        self._closed = closed
        self._open = True
        self._lock = threading.Lock()

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. The same metadata again does nothing, other metadata takes its place.

        Raises:
            PeerMetadataError: not of this backend, or of another release of it.
            WorkerUnreachable: the worker cannot be reached; with the reason.
        """
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known is None or known.metadata != metadata:
                self._connect(peer, metadata)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Start copying. What goes wrong before anything was posted is raised; after that the transfer is FAILED.

        Raises:
            TransferRefused: an unknown peer, a closed lane, malformed columns, memory that is not registered, an
                operation that this backend has not, or the engine did not take it.
            WorkerUnreachable: the peer's process or its backend is gone.
            BackendError: the device would not take it.
        """
        with self._lock:
            self._known(peer)
            return self._submit(peer, descriptors, operation)

    def holdings(self) -> tuple[Holding, ...]:
        """What it holds of each peer, for people. Takes no lock, as a call into an engine may hold that for long."""
        return tuple(self._holding(name, known) for name, known in list(self._peers.items()))

    def _holding(self, name: str, known: PeerT) -> Holding:  # noqa: ARG002 - for adapters that know more
        """What it holds of one of ``_peers``; an adapter that knows how much says so."""
        return Holding(name, 0, 0)

    @abstractmethod
    def _connect(self, peer: str, metadata: bytes) -> None:
        """Put ``peer`` into ``_peers``, in the place of what is known of it."""

    @abstractmethod
    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """`submit` to one of ``_peers`` on an open lane."""

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=self._backend_name)

    def _known(self, peer: str) -> PeerT:
        self._opened()
        known = self._peers.get(peer)
        if known is None:
            raise TransferRefused(
                f"peer {peer!r} was not added to lane {self.name!r}", backend=self._backend_name
            )
        return known


class EngineLane(PeerLane[PeerT], Generic[PeerT, WorkT]):
    """A lane that moves bytes. ``_live`` has the transfers under way by their handles, the adapter's works."""

    def __init__(self, name: str, backend: str, closed: Callable[[Any], None]) -> None:
        """As `PeerLane`."""
        super().__init__(name, backend, closed)
        self._live: dict[WorkT, Transfer] = {}

    def poll(self, transfer: Transfer) -> State:
        """Look once, let go on what the caller's thread moves, and update ``transfer``."""
        with self._lock:
            if transfer.state is State.PENDING:
                if self._open and transfer.handle in self._live:
                    self._look(transfer.handle, transfer)
                else:
                    transfer.end(f"not a transfer of lane {self.name!r}")
            return transfer.state

    def close(self) -> None:
        """End the lane: what was pending has failed, and nothing of it lands any more. Idempotent.

        Raises:
            BackendError: it could not be ended: treat the memory of its transfers as still being written; call again.
        """
        with self._lock:
            self._open = False
            self._stop(f"lane {self.name!r} was closed before the transfer ended")
        self._closed(self)

    @abstractmethod
    def _look(self, work: WorkT, transfer: Transfer) -> None:
        """Look at a work that is under way, and `_end` its transfer where it is over."""

    @abstractmethod
    def _stop(self, reason: str) -> None:
        """See that nothing can land any more, and `_end` what is under way for ``reason``."""

    def _only_read(self, peer: str, operation: Operation, why: str) -> None:
        """Refuse what is no read, and say ``why`` this backend only reads."""
        if operation != "read":
            raise TransferRefused(
                f"{operation} to {peer!r}: this backend only reads, {why}",
                backend=self._backend_name,
                hint="let the other side read",
            )

    def _begin(self, transfer: Transfer) -> Transfer:
        """Note that it is under way from now on."""
        transfer.posted = time.monotonic()
        self._live[transfer.handle] = transfer
        return transfer

    def _end(self, transfer: Transfer, reason: str = "") -> None:
        self._live.pop(transfer.handle, None)
        transfer.end(reason)

    def _end_all(self, reason: str, of: Callable[[WorkT], bool] = lambda _: True) -> None:
        for work, transfer in list(self._live.items()):
            if of(work):
                self._end(transfer, reason)


class EngineWindow(ABC):
    """What one peer engine writes into. Used from one thread at a time."""

    def __init__(self, name: str, metadata: bytes, backend: str, closed: Callable[[Any], None]) -> None:
        """``metadata`` as `metadata` gives it, ``backend`` for errors; ``closed`` is called with the closed window."""
        self.name = name
        self._metadata = metadata
        self._backend_name = backend
        self._closed = closed
        self._open = True

    def metadata(self) -> bytes:
        """What the writing peer's `Lane.add` needs.

        Raises:
            TransferRefused: the window is closed.
        """
        self._opened()
        return self._metadata

    def progress(self) -> None:
        """Do nothing while it is open, as bytes land by themselves.

        Raises:
            TransferRefused: the window is closed.
        """
        self._opened()

    def close(self) -> None:
        """End the window: when this returns nothing that the peer writes through it can land any more. Idempotent.

        Raises:
            BackendError: it could not be ended, so bytes may still land; call again.
        """
        self._open = False
        self._stop()
        self._closed(self)

    @abstractmethod
    def _stop(self) -> None:
        """See that nothing can land any more."""

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"window {self.name!r} is closed", backend=self._backend_name)


class EngineBackend(ABC, Generic[ClosingT]):
    """A worker's memory, ``regions`` once it is registered, and the lanes and windows made over it."""

    def __init__(self, name: str, backend: str) -> None:
        """``name`` is the worker's, ``backend`` for errors."""
        self.name = name
        self.regions: tuple[Region, ...] = ()
        self.serving: frozenset[int] = frozenset()
        self._backend_name = backend
        self._made: dict[Closing, None] = {}
        self._open = True

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory. Once, before `metadata` and `lane`.

        Raises:
            RegistrationError: registered before, nothing given, or memory that this backend cannot register, and why.
            BackendError: the backend is closed, or does not start for this memory.
        """
        self._opened()
        if self.regions:
            raise RegistrationError(
                f"{len(self.regions)} regions are registered already, and {len(regions)} more were given",
                backend=self._backend_name,
                hint="a backend registers once: close it and open another",
            )
        self._register(regions)
        self.regions = tuple(regions)

    def metadata(self) -> bytes:
        """What a peer's `Lane.add` needs.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        self._ready()
        return self._describe()

    def lane(self, name: str) -> ClosingT:
        """A fresh lane.

        Raises:
            RegistrationError: nothing is registered yet.
            BackendError: the engine does not make one.
        """
        self._ready()
        return self._keep(self._lane(name))

    def close(self) -> None:
        """Close all lanes and windows, then what the backend itself holds. Idempotent.

        Raises:
            BackendError: something outlived it: call again.
        """
        for made in list(self._made):
            made.close()
        self._open = False
        self._end()

    @abstractmethod
    def _register(self, regions: Sequence[Region]) -> None:
        """Register memory for good, or nothing of it."""

    @abstractmethod
    def _describe(self) -> bytes:
        """`metadata`, of registered memory."""

    @abstractmethod
    def _lane(self, name: str) -> ClosingT:
        """`lane`, over registered memory; it calls `_drop` when it is closed."""

    @abstractmethod
    def _end(self) -> None:
        """Give up what is held, once; lanes and windows are closed."""

    def _opened(self) -> None:
        if not self._open:
            raise BackendError(f"backend {self.name!r} is closed", backend=self._backend_name)

    def _ready(self) -> None:
        self._opened()
        if not self.regions:
            raise RegistrationError(
                "no memory is registered", backend=self._backend_name, hint="register memory first"
            )

    def _keep(self, made: KeptT) -> KeptT:
        """A lane or window, to be closed with the backend."""
        self._made[made] = None
        return made

    def _drop(self, made: Closing) -> None:
        """Forget what was closed."""
        self._made.pop(made, None)
