"""What the adapters' lanes, windows and backends have in common: who is known, what is under way, what is open.

An adapter derives its lane from `EngineLane` and says how to connect, to look and to stop. All lanes are polled and
closed in one way, which is here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kvd.backends.contract import Operation, State, Transfer
from kvd.backends.errors import BackendError, RegistrationError, TransferRefused


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


class EngineLane(ABC, Generic[PeerT, WorkT]):
    """The way to one peer engine. Calls from several threads wait for each other, `close` too.

    ``_live`` has the transfers under way by their handles, which are the adapter's works.
    """

    def __init__(self, name: str, backend: str, closed: Callable[[Any], None]) -> None:
        """``backend`` is for errors; ``closed`` is called with the lane once it is closed."""
        self.name = name
        self._backend_name = backend
        self._peers: dict[str, PeerT] = {}
        self._live: dict[WorkT, Transfer] = {}
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
                self._connect(peer, metadata, known)

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
    def _connect(self, peer: str, metadata: bytes, known: PeerT | None) -> None:
        """Put ``peer`` into ``_peers``, in the place of what is ``known`` of it."""

    @abstractmethod
    def _look(self, work: WorkT, transfer: Transfer) -> None:
        """Look at a work that is under way, and `_end` its transfer where it is over."""

    @abstractmethod
    def _stop(self, reason: str) -> None:
        """See that nothing can land any more, and `_end` what is under way for ``reason``."""

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

    def _only_read(self, peer: str, operation: Operation, why: str) -> None:
        """Refuse what is no read, and say ``why`` this backend only reads."""
        if operation != "read":
            raise TransferRefused(
                f"{operation} to {peer!r}: this backend only reads, {why}",
                backend=self._backend_name,
                hint="let the other side read",
            )

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


class Holdings:
    """What a backend has made of its memory, and whether it is open and has any; lanes and windows end before it."""

    def __init__(self, name: str, backend: str) -> None:
        """``name`` is the worker's, ``backend`` for errors."""
        self._name = name
        self._backend = backend
        self._made: dict[Closing, None] = {}
        self._open = True
        self._registered = False

    def opened(self, *, registered: bool = False) -> None:
        """Refuse a backend that is closed, or where that is asked for has no memory.

        Raises:
            BackendError, RegistrationError: so it is.
        """
        if not self._open:
            raise BackendError(f"backend {self._name!r} is closed", backend=self._backend)
        if registered and not self._registered:
            raise RegistrationError("register memory first", backend=self._backend)

    def registering(self) -> None:
        """Refuse to register twice; `registered` says that it is done.

        Raises:
            BackendError, RegistrationError: the backend is closed, or has memory.
        """
        self.opened()
        if self._registered:
            raise RegistrationError("memory of this backend is registered already", backend=self._backend)

    def registered(self) -> None:
        """Memory is registered now."""
        self._registered = True

    def keep(self, made: ClosingT) -> ClosingT:
        """A lane or window, to be closed with the backend."""
        self._made[made] = None
        return made

    def drop(self, made: Closing) -> None:
        """Forget what was closed."""
        self._made.pop(made, None)

    def close(self) -> bool:
        """Close all that was made; whether the backend was open until now.

        Raises:
            BackendError: as the lanes and windows.
        """
        for made in list(self._made):
            made.close()
        was, self._open = self._open, False
        return was
