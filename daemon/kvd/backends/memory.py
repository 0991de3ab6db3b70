"""The memory backend: copies inside one process, with faults on demand, to test recovery without any network.

Backends of one process find each other through a registry by name and generation, and the bytes are copied when a
transfer is polled. A `Faults` script makes the n-th transfer wait, fail half-way or land late, always at the same
point, so what a connector does about it can be asserted. Like the real engines it lets late bytes land: those of a read
until its lane is closed, those of a write until what they are written into is closed, whatever became of the lane.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.backends.contract import Operation, State, Traits, Transfer
from kvd.backends.envelope import Envelope, pack, unpack
from kvd.backends.errors import TransferRefused, WorkerUnreachable
from kvd.backends.lanes import EngineBackend, EngineLane, EngineWindow
from kvd.backends.options import known_options
from kvd.backends.regions import RegisteredMemory, check_regions, check_selection, checked
from kvd.backends.window_owner import before_last_dot, same_worker
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Selection

NAME = "memory"
VERSION = "1"

_agents: weakref.WeakValueDictionary[str, MemoryBackend | MemoryWindow] = weakref.WeakValueDictionary()
_generations = itertools.count(1)


@dataclass(slots=True)
class Faults:
    """What goes wrong, by number of the submit on this backend (its lanes together, the first is 0).

    ``hold``: these stay PENDING until `release`. ``refuse``: these raise `TransferRefused`. ``fail_after``: these copy
    that many descriptors and end FAILED. ``late``: these fail at once with nothing copied, and all their bytes land at
    `release`, unless that was made impossible before: by closing the lane that read, or what was written into.
    """

    hold: set[int] = field(default_factory=set)
    refuse: set[int] = field(default_factory=set)
    fail_after: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    _waiting: dict[int, Callable[[], None]] = field(default_factory=dict)

    def release(self, number: int) -> None:
        """Let a held transfer run at its next poll, or the bytes of a late one land now."""
        self.hold.discard(number)
        land = self._waiting.pop(number, None)
        if land:
            land()

    def defer(self, number: int, land: Callable[[], None]) -> None:
        """Keep what will land at `release` (for the lane)."""
        self._waiting[number] = land


def open_backend(name: str, *, options: Mapping[str, Any]) -> MemoryBackend:
    """A backend in this process. The only option is ``faults``, a `Faults` that the caller keeps to steer it.

    Raises:
        BackendError: an unknown option.
    """
    known_options(options, ("faults",), backend=NAME)
    return MemoryBackend(name, options.get("faults") or Faults())


def check_window(card: bytes, announced: bytes) -> None:
    """Refuse a window of another backend's, or over other memory. Raises `ForeignWindow` and `PeerMetadataError`."""
    same_worker(card, announced, backend=NAME, name_of=before_last_dot)


class MemoryBackend(EngineBackend["MemoryLane"]):
    """Memory of this process that peers of this process may read and write. Closed, it vanishes from their sight."""

    traits = Traits(strided_lists=True, lands=True)

    def __init__(self, name: str, faults: Faults) -> None:
        super().__init__(name, NAME)
        self.faults = faults
        self.submits = itertools.count()
        self._agent = f"{name}.{next(_generations)}"
        _agents[self._agent] = self

    def _register(self, regions: Sequence[Region]) -> None:
        check_regions(regions, backend=NAME, kinds=("cpu",))

    def _describe(self) -> bytes:
        return pack(Envelope(NAME, VERSION, self._agent, self.regions, b""))

    def _lane(self, name: str) -> MemoryLane:
        return MemoryLane(name, self, self._drop)

    def window(self, name: str) -> MemoryWindow:
        """A fresh window for one peer engine.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        self._ready()
        return self._keep(MemoryWindow(f"{self._agent}.{name}", self.regions, self._drop))

    def _end(self) -> None:
        _agents.pop(self._agent, None)


class MemoryWindow(EngineWindow):
    """The backend's memory under another name. The writer's polls copy."""

    def __init__(
        self, name: str, regions: tuple[Region, ...], closed: Callable[[MemoryWindow], None]
    ) -> None:
        self.regions = regions
        self._agent = f"{name}.{next(_generations)}"
        super().__init__(name, pack(Envelope(NAME, VERSION, self._agent, regions, b"")), NAME, closed)
        _agents[self._agent] = self

    def _stop(self) -> None:
        _agents.pop(self._agent, None)


@dataclass(slots=True, eq=False)
class _Copying:
    """A submitted transfer: which one it is, to whom, and what is to be copied."""

    number: int
    agent: str
    rows: Descriptors
    operation: Operation


@dataclass(frozen=True, slots=True)
class _MemoryPeer:
    metadata: bytes
    agent: str


class MemoryLane(EngineLane[_MemoryPeer, _Copying]):
    """The way to one peer engine."""

    def __init__(self, name: str, backend: MemoryBackend, closed: Callable[[MemoryLane], None]) -> None:
        super().__init__(name, NAME, closed)
        self._backend = backend

    def _connect(self, peer: str, metadata: bytes) -> None:
        envelope = unpack(metadata, backend=NAME, version=VERSION)
        self._reach(envelope.agent)
        self._peers[peer] = _MemoryPeer(metadata, envelope.agent)

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """Note what is to be copied; `poll` copies."""
        known = self._peers[peer]
        faults, number = self._backend.faults, next(self._backend.submits)
        if number in faults.refuse:
            raise TransferRefused(f"submit {number} is to be refused", backend=NAME)
        mine, theirs = self._backend.regions, self._reach(known.agent).regions
        rows = checked(descriptors, RegisteredMemory(mine), RegisteredMemory(theirs), backend=NAME)
        work = _Copying(number, known.agent, rows, operation)
        transfer = self._begin(Transfer(peer, rows.nbytes, len(rows), work))
        if number in faults.late:
            faults.defer(number, lambda: self._land(work))
            self._end(transfer, f"submit {number} is to fail and to land late")
        return transfer

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        """As `submit`: nothing here is worth preparing.

        Raises:
            TransferRefused: as `submit`, columns of unequal length, or a cell that the grid does not have.
        """
        check_selection(selection, backend=NAME)
        return self.submit(peer, selection.descriptors(), operation)

    def precede(self, transfer: Transfer, stream: int) -> None:  # noqa: ARG002 - the host has no streams
        """See that the bytes are here, as a device's stream would; on any thread."""
        while (
            self.poll(transfer) is State.PENDING and transfer.handle.number not in self._backend.faults.hold
        ):
            pass

    def _look(self, work: _Copying, transfer: Transfer) -> None:
        faults = self._backend.faults
        if work.number in faults.hold:
            return
        if work.agent not in _agents:
            self._end(transfer, f"transfer with {transfer.peer}: {work.agent!r} was closed")
        elif work.number in faults.fail_after:
            _copy(work, faults.fail_after[work.number])
            self._end(transfer, f"submit {work.number} is to fail half-way")
        else:
            _copy(work, len(work.rows))
            self._end(transfer)

    def _stop(self, reason: str) -> None:
        """What it was to read late never lands either."""
        self._end_all(reason)

    def _land(self, work: _Copying) -> None:
        if (self._open or work.operation == "write") and work.agent in _agents:
            _copy(work, len(work.rows))

    @staticmethod
    def _reach(agent: str) -> MemoryBackend | MemoryWindow:
        reached = _agents.get(agent)
        if reached is None:
            raise WorkerUnreachable(f"{agent!r} was closed, or is in another process", backend=NAME)
        return reached


def _copy(work: _Copying, count: int) -> None:
    rows = work.rows
    for local, remote, length in zip(
        rows.local[:count].tolist(), rows.remote[:count].tolist(), rows.length[:count].tolist(), strict=True
    ):
        target, source = (local, remote) if work.operation == "read" else (remote, local)
        ctypes.memmove(target, source, length)
