"""The memory backend: copies inside one process, with faults on demand, to test recovery without any network.

Backends of one process find each other through a registry by name and generation, and the bytes are copied when a
transfer is polled. A `Faults` script makes the n-th transfer wait, fail half-way or land late, always at the same
point, so what a connector does about it can be asserted. Like the real engines it lets late bytes land: those of a read
until its lane is closed, those of a write until what they are written into is closed, whatever became of the lane.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.backends.contract import Operation, State, Traits, Transfer
from kvd.backends.envelope import Envelope, pack, unpack
from kvd.backends.errors import (
    BackendError,
    PeerUnreachable,
    RegistrationError,
    TransferRefused,
)
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors, Int64
from kvd.topology.grid import Selection

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
    unknown = sorted(set(options) - {"faults"})
    if unknown:
        raise BackendError(f"unknown option {', '.join(unknown)} for memory; known is faults", backend=NAME)
    return MemoryBackend(name, options.get("faults") or Faults())


class MemoryBackend:
    """Memory of this process that peers of this process may read and write."""

    traits = Traits(notifications=False, strided_lists=True, late_writes_stop_at="lane", lands=True)

    def __init__(self, name: str, faults: Faults) -> None:
        self.name = name
        self.faults = faults
        self.regions: tuple[Region, ...] = ()
        self.submits = itertools.count()
        self._agent = f"{name}.{next(_generations)}"
        self._lanes: set[MemoryLane] = set()
        self._windows: set[MemoryWindow] = set()
        self._closed = False
        _agents[self._agent] = self

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory. Once, before `metadata` and `lane`.

        Raises:
            RegistrationError: registered before, nothing given, or a region that is empty or not host memory.
        """
        if self.regions:
            raise RegistrationError("memory of this backend is registered already", backend=NAME)
        if not regions:
            raise RegistrationError("no regions to register", backend=NAME)
        for region in regions:
            if region.device != "cpu" or region.length <= 0 or region.address <= 0:
                raise RegistrationError(f"{region} cannot be registered: cpu memory only", backend=NAME)
        self.regions = tuple(regions)

    def metadata(self) -> bytes:
        """What a peer's `MemoryLane.add` needs.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        self._registered()
        return pack(Envelope(NAME, VERSION, self._agent, self.regions, b""))

    def lane(self, name: str) -> MemoryLane:
        """A fresh lane.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        self._registered()
        lane = MemoryLane(name, self, self._lanes.discard)
        self._lanes.add(lane)
        return lane

    def window(self, name: str) -> MemoryWindow:
        """A fresh window for one peer engine.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        self._registered()
        window = MemoryWindow(f"{self._agent}.{name}", self.regions, self._windows.discard)
        self._windows.add(window)
        return window

    def close(self) -> None:
        """Close all lanes and windows and vanish from the peers' sight. Idempotent."""
        for lane in list(self._lanes):
            lane.close()
        for window in list(self._windows):
            window.close()
        self._closed = True
        _agents.pop(self._agent, None)

    def _registered(self) -> None:
        if self._closed:
            raise BackendError(f"backend {self.name!r} is closed", backend=NAME)
        if not self.regions:
            raise RegistrationError("register memory first", backend=NAME)


class MemoryWindow:
    """What one peer engine writes into: the backend's memory under another name."""

    def __init__(
        self, name: str, regions: tuple[Region, ...], closed: Callable[[MemoryWindow], None]
    ) -> None:
        self.regions = regions
        self._agent = f"{name}.{next(_generations)}"
        self._closed = closed
        _agents[self._agent] = self

    def metadata(self) -> bytes:
        """What the writing peer's `MemoryLane.add` needs.

        Raises:
            TransferRefused: the window is closed.
        """
        self._opened()
        return pack(Envelope(NAME, VERSION, self._agent, self.regions, b""))

    def progress(self) -> None:
        """Do nothing: the writer's polls copy.

        Raises:
            TransferRefused: the window is closed.
        """
        self._opened()

    def close(self) -> None:
        """End the window: what was to land late never will. Idempotent."""
        _agents.pop(self._agent, None)
        self._closed(self)

    def _opened(self) -> None:
        if self._agent not in _agents:
            raise TransferRefused(f"window {self._agent!r} is closed", backend=NAME)


@dataclass(slots=True, eq=False)
class _Work:
    """A submitted transfer: which one it is, to whom, and what is to be copied."""

    number: int
    agent: str
    rows: Descriptors
    operation: Operation


class MemoryLane:
    """The way to one peer engine."""

    def __init__(self, name: str, backend: MemoryBackend, closed: Callable[[MemoryLane], None]) -> None:
        self.name = name
        self._backend = backend
        self._peers: dict[str, tuple[bytes, str]] = {}
        self._live: list[Transfer] = []
        self._on_close = closed
        self._open = True

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. The same metadata again does nothing, other metadata takes its place.

        Raises:
            PeerMetadataError: not of this backend or of another version of it.
            PeerUnreachable: its backend was closed.
        """
        self._opened()
        envelope = unpack(metadata, backend=NAME, version=VERSION)
        self._reach(envelope.agent)
        self._peers[peer] = (metadata, envelope.agent)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Note what is to be copied; `poll` copies.

        Raises:
            TransferRefused: unknown peer, closed lane, memory that is not registered, or a fault asked for it.
            PeerUnreachable: the peer's backend was closed.
        """
        self._opened()
        if peer not in self._peers:
            raise TransferRefused(f"peer {peer!r} was not added to lane {self.name!r}", backend=NAME)
        agent = self._peers[peer][1]
        faults, number = self._backend.faults, next(self._backend.submits)
        if number in faults.refuse:
            raise TransferRefused(f"submit {number} is to be refused", backend=NAME)
        _inside(descriptors.local, descriptors.length, self._backend.regions, "local")
        _inside(descriptors.remote, descriptors.length, self._reach(agent).regions, "remote")
        work = _Work(number, agent, descriptors, operation)
        transfer = Transfer(peer, descriptors.nbytes, len(descriptors), work, posted=time.monotonic())
        self._live.append(transfer)
        if number in faults.late:
            faults.defer(number, lambda: self._land(work))
            self._end(transfer, State.FAILED, f"submit {number} is to fail and to land late")
        return transfer

    def submit_selection(self, peer: str, selection: Selection, operation: Operation = "read") -> Transfer:
        """As `submit`: nothing here is worth preparing.

        Raises:
            TransferRefused: as `submit`, columns of unequal length, or a cell that the grid does not have.
        """
        _on_grid(selection)
        return self.submit(peer, selection.descriptors(), operation)

    def poll(self, transfer: Transfer) -> State:
        """Copy what is due and update ``transfer``."""
        if transfer.state is not State.PENDING:
            return transfer.state
        if not self._open or transfer not in self._live:
            self._end(transfer, State.FAILED, f"not a transfer of lane {self.name!r}")
            return transfer.state
        work: _Work = transfer.handle
        faults = self._backend.faults
        if work.number in faults.hold:
            return State.PENDING
        if work.agent not in _agents:
            self._end(transfer, State.FAILED, f"transfer with {transfer.peer}: {work.agent!r} was closed")
        elif work.number in faults.fail_after:
            _copy(work, faults.fail_after[work.number])
            self._end(transfer, State.FAILED, f"submit {work.number} is to fail half-way")
        else:
            _copy(work, len(work.rows))
            self._end(transfer, State.DONE, "")
        return transfer.state

    def close(self) -> None:
        """End the lane: what was pending has failed and what it was to read late never lands. Idempotent."""
        self._open = False
        for transfer in list(self._live):
            self._end(transfer, State.FAILED, f"lane {self.name!r} was closed before the transfer ended")
        self._on_close(self)

    def _land(self, work: _Work) -> None:
        if (self._open or work.operation == "write") and work.agent in _agents:
            _copy(work, len(work.rows))

    def _end(self, transfer: Transfer, state: State, reason: str) -> None:
        transfer.state, transfer.reason, transfer.ended = state, reason, time.monotonic()
        self._live = [held for held in self._live if held is not transfer]

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=NAME)

    @staticmethod
    def _reach(agent: str) -> MemoryBackend | MemoryWindow:
        reached = _agents.get(agent)
        if reached is None:
            raise PeerUnreachable(f"{agent!r} was closed, or is in another process", backend=NAME)
        return reached


def _copy(work: _Work, count: int) -> None:
    rows = work.rows
    for local, remote, length in zip(
        rows.local[:count].tolist(), rows.remote[:count].tolist(), rows.length[:count].tolist(), strict=True
    ):
        target, source = (local, remote) if work.operation == "read" else (remote, local)
        ctypes.memmove(target, source, length)


def _on_grid(selection: Selection) -> None:
    if len(selection.local) != len(selection.remote):
        raise TransferRefused(
            f"selections differ in length: {len(selection.local)} local, {len(selection.remote)} remote",
            backend=NAME,
        )
    grid = selection.grid
    for cells, blocks in ((selection.local, grid.local_blocks), (selection.remote, grid.remote_blocks)):
        if len(cells) and not 0 <= int(cells.min()) <= int(cells.max()) < len(grid) * blocks:
            raise TransferRefused(
                f"cells {int(cells.min())}..{int(cells.max())} picked of a grid of {len(grid) * blocks}",
                backend=NAME,
            )


def _inside(addresses: Int64, lengths: Int64, regions: Sequence[Region], side: str) -> None:
    """Refuse the first row that does not lie inside one region."""
    fits = np.zeros(len(addresses), np.bool_)
    for region in regions:
        fits |= (addresses >= region.address) & (addresses + lengths <= region.address + region.length)
    if not fits.all():
        row = int(np.argmin(fits))
        raise TransferRefused(
            f"{side} descriptor {row}, {int(lengths[row])} bytes at {int(addresses[row]):#x}, is not registered",
            backend=NAME,
        )
