"""Two backends whose lanes are watched, for a lane that reads by several of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from kvd.backends.contract import Backend, Operation, SelectingLane, State, Transfer, orders_streams
from kvd.backends.registry import open_backend
from kvd.backends.split_lane import SplitLane
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Selection

SIZE = 48 << 20
PATIENCE = 20
"""Seconds that a thread waits for what another one is about to do."""


@dataclass(slots=True, eq=False)
class Watched:
    """A real lane that tells what it was asked, and by which thread; ``before`` is called with the bytes of a post."""

    lane: SelectingLane
    posts: list[tuple[str, int]] = field(default_factory=list)
    before: Callable[[int], None] = lambda _: None
    closed: bool = False

    def add(self, peer: str, metadata: bytes) -> None:
        self.lane.add(peer, metadata)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        self._note(descriptors.nbytes)
        return self.lane.submit(peer, descriptors, operation)

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        self._note(selection.nbytes)
        return self.lane.submit_selection(peer, selection, operation)

    def poll(self, transfer: Transfer) -> State:
        return self.lane.poll(transfer)

    @property
    def precede(self) -> Callable[[Transfer, int], None]:
        if not orders_streams(self.lane):
            raise AttributeError("precede")
        return self.lane.precede

    def close(self) -> None:
        self.lane.close()
        self.closed = True

    def _note(self, nbytes: int) -> None:
        self.posts.append((threading.current_thread().name, nbytes))
        self.before(nbytes)


class SplitBench:
    """Two backends of one backend over memory of this process, and the lanes that a split lane opens."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.source = (np.arange(SIZE, dtype=np.int64) * 31 % 251 + 1).astype(np.uint8)
        self.target = np.zeros(SIZE, np.uint8)
        self.peer, self.me = (self._backend(kind, memory, stack) for memory in (self.source, self.target))
        self.opened: list[Watched] = []
        self._stack = stack

    @staticmethod
    def _backend(kind: str, memory: np.ndarray[tuple[int], np.dtype[np.uint8]], stack: ExitStack) -> Backend:
        backend = open_backend(kind, "worker", {} if kind == "memory" else {"copy_threads": 1})
        stack.callback(backend.close)
        backend.register([Region(memory.ctypes.data, SIZE)])
        return backend

    def open(self, name: str) -> Watched:
        lane = self.me.lane(name)
        assert isinstance(lane, SelectingLane)
        self.opened.append(Watched(lane))
        return self.opened[-1]

    def lane(self, threads: int = 2, opening: Callable[[str], SelectingLane] | None = None) -> SplitLane:
        lane = SplitLane("peer", "memory", threads, opening or self.open, lambda _: None)
        self._stack.callback(lane.close)
        lane.add("p", self.peer.metadata())
        return lane

    def split(self, threads: int = 2) -> SplitLane:
        """A lane that has read something large, and with that has opened its others."""
        lane = self.lane(threads)
        for _ in range(4):  # NIXL connects in the first read of each lane, and only then copies in the post
            assert finish(lane, lane.submit("p", self.whole())) is State.DONE
            lane.add("p", self.peer.metadata())  # waits for lanes that are being opened
        assert len(self.opened) == threads
        self.target[:] = 0
        for watched in self.opened:
            watched.posts.clear()
        return lane

    def whole(self, size: int = SIZE) -> Descriptors:
        return self.rows(np.array([0]), np.array([0]), np.array([size]))

    def rows(self, local: object, remote: object, length: object) -> Descriptors:
        here, there, lengths = (np.asarray(column, np.int64) for column in (local, remote, length))
        return Descriptors(here + self.target.ctypes.data, there + self.source.ctypes.data, lengths)


def finish(lane: SplitLane, transfer: Transfer) -> State:
    while lane.poll(transfer) is State.PENDING:
        pass
    return transfer.state


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


def together(*lanes: Watched) -> None:
    """Have each lane's thread wait in its first post for those of the others: all of them copy, whoever is fast."""
    barrier = threading.Barrier(len(lanes))
    for lane in lanes:

        def meet(_: int, lane: Watched = lane) -> None:
            if len(lane.posts) == 1:
                barrier.wait(PATIENCE)

        lane.before = meet
