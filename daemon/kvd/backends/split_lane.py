"""A lane that splits large reads between threads, where it is the posting thread that copies.

NIXL over CMA and direct reads of host memory move bytes inside the calls of the one who posts: one processor copies,
and the others look on. Here each thread has a lane of its own to the same peer engine. It takes the next piece of a
read when it has finished the last. So a thread that gets no processor delays only its own piece.

Which transport a lane has is seen, not asked: the first large read goes by one lane, and if it was copied within its
post, the other lanes are opened beside it. What a network moves is still on its way then, unless it is thousands of
pieces, so that posting them is the work.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvd.backends.contract import (
    Holding,
    Operation,
    SelectingLane,
    State,
    Transfer,
    holdings_of,
    orders_streams,
)
from kvd.backends.errors import BackendError
from kvd.backends.lanes import EngineLane
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Selection
from kvd.topology.split import split_descriptors, split_selection

LEAST_BYTES = 8 << 20
"""Of a read that is split; handing pieces over costs some 0.1 ms, which smaller ones do not gain."""

PIECE_BYTES = 32 << 20
"""At most; some milliseconds, during which the lane cannot be closed. A thread that gets less of its processor leaves
more pieces to the others; but each piece costs 0.1 ms of Python, and beside a thread that keeps Python's lock two waits
for that."""

SLICE_S = 0.05
"""How long a call of `submit` or `poll` takes pieces: long beside an owner's pause between polls, short beside a
deadline."""

POST_S = 50e-6
"""More than it takes to post a descriptor that a network then moves (docs/backends/nixl.md, "Costs")."""

_log = logging.getLogger(__name__)

_PostOn = Callable[[SelectingLane], Transfer]
LaneT = TypeVar("LaneT", bound=SelectingLane)


@dataclass(slots=True, eq=False)
class _Split:
    """A read in pieces, as threads take them: ``rest`` is what nobody has posted, ``parts`` what is."""

    rest: deque[_PostOn]
    parts: list[tuple[SelectingLane, Transfer]] = field(default_factory=list)
    refused: list[BackendError] = field(default_factory=list)

    def take(self, lane: SelectingLane, until: float) -> None:
        """Post pieces on ``lane`` while there are any, none was refused by any lane, and it is not ``until`` yet.

        One that was not copied within its post is this lane's last for now: it failed, or the lane is still connecting.
        """
        state = State.DONE
        while state is State.DONE and not self.refused and time.monotonic() < until:
            try:
                post = self.rest.popleft()
            except IndexError:
                return
            try:
                part = post(lane)
            except BackendError as error:
                self.refused.append(error)
                return
            self.parts.append((lane, part))
            state = part.state

    @property
    def failure(self) -> str:
        """Why it failed, nothing where it did not."""
        reasons = [part.reason for _, part in self.parts if part.state is State.FAILED]
        reasons += [error.with_hint for error in self.refused]
        return reasons[0] if reasons else ""

    @property
    def done(self) -> bool:
        """Whether all of it has come."""
        return not self.rest and all(part.state is State.DONE for _, part in self.parts)


@dataclass(frozen=True, slots=True)
class SplitPeer:
    """A worker, as each of the lanes knows it."""

    metadata: bytes


class SplitLane(EngineLane[SplitPeer, _Split]):
    """The way to one peer engine, by up to ``threads`` lanes.

    What it promises is what its lanes do: when a call has returned no other thread is in any of them. A read in pieces
    goes on for at most `SLICE_S` seconds in `submit`, and then with `poll`. An error of the first piece is raised; one
    after that is a FAILED transfer, as others may have been copied.
    """

    def __init__(
        self,
        name: str,
        backend: str,
        threads: int,
        opening: Callable[[str], SelectingLane],
        closed: Callable[[SplitLane], None],
    ) -> None:
        """``opening`` makes one lane, of ``backend``. Raises what it raises."""
        super().__init__(name, backend, closed)
        self._threads = threads
        self._opening = opening
        self._first = opening(name)
        self._others: tuple[SelectingLane, ...] = ()
        self._coming: Future[tuple[SelectingLane, ...]] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. Raises as the first lane, which also knows whether there is news."""
        with self._lock:
            self._opened()
            self._connect(peer, metadata)

    def holdings(self) -> tuple[Holding, ...]:
        """As the first lane: the others hold the same memory once more."""
        return holdings_of(self._first)

    def _connect(self, peer: str, metadata: bytes) -> None:
        """One that only another lane than the first cannot reach is read by the first alone."""
        self._settle()
        try:
            self._first.add(peer, metadata)
        except BackendError:
            self._close_others()  # they may still know what the peer was before
            raise
        self._peers[peer] = SplitPeer(metadata)
        try:
            for lane in self._others:
                lane.add(peer, metadata)
        except BackendError as error:
            _log.warning("reads by %s are no longer split: %s", self.name, error)
            self._close_others()

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        nbytes = descriptors.nbytes
        pieces = self._pieces(nbytes, operation)
        if not pieces or not _sound(descriptors):
            return self._post(_posting(peer, descriptors, operation), nbytes, operation)
        split = [_posting(peer, piece, operation) for piece in split_descriptors(descriptors, pieces)]
        return self._start(Transfer(peer, nbytes, len(descriptors), _Split(deque(split))))

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        """As `submit`, by numbers of cells.

        Raises:
            BackendError: as `submit`.
        """
        with self._lock:
            self._known(peer)
            nbytes = selection.nbytes
            pieces = self._pieces(nbytes, operation)
            if not pieces or len(selection) != len(selection.remote):
                return self._post(_posting_selection(peer, selection, operation), nbytes, operation)
            split = [
                _posting_selection(peer, piece, operation) for piece in split_selection(selection, pieces)
            ]
            return self._start(Transfer(peer, nbytes, len(selection), _Split(deque(split))))

    @property
    def precede(self) -> Callable[[Transfer, int], None]:
        """As its lanes, of a whole transfer (`kvd.backends.contract.OrderedLane`); AttributeError if they have none."""
        if not orders_streams(self._first):
            raise AttributeError("precede")
        return self._await

    def _await(self, transfer: Transfer, _stream: int) -> None:
        while self.poll(transfer) is State.PENDING:
            pass

    def poll(self, transfer: Transfer) -> State:
        """Look once and update ``transfer``; pieces that nobody has taken are taken now."""
        if isinstance(transfer.handle, _Split):
            return super().poll(transfer)
        with self._lock:
            return self._first.poll(transfer)

    def _stop(self, reason: str) -> None:
        self._settle()
        for split in self._live:
            split.rest.clear()
        self._first.close()
        self._close_others()
        for split, transfer in list(self._live.items()):
            self._end(transfer, split.failure or reason)
        if self._pool is not None:
            self._pool.shutdown()

    def _pieces(self, nbytes: int, operation: Operation) -> int:
        """In how many pieces to read this, 0 for not at all in pieces."""
        if self._coming is not None and self._coming.done():
            self._settle()
        if not self._others or operation != "read" or nbytes < LEAST_BYTES:
            return 0
        return max(1 + len(self._others), -(-nbytes // PIECE_BYTES))

    def _post(self, post: _PostOn, nbytes: int, operation: Operation) -> Transfer:
        """By the first lane alone; see whether the thread that posts is the one that copies."""
        began = time.thread_time()
        transfer = post(self._first)
        busy = time.thread_time() - began
        copied = transfer.state is State.DONE or busy > max(SLICE_S / 2, transfer.descriptors * POST_S)
        large = operation == "read" and nbytes >= LEAST_BYTES
        if large and copied and self._pool is None and (others := min(self._threads, _processors()) - 1) > 0:
            self._pool = ThreadPoolExecutor(others, thread_name_prefix=f"kvd-copy-{self.name}")
            self._coming = self._pool.submit(self._open_others, others)
        return transfer

    def _start(self, transfer: Transfer) -> Transfer:
        split: _Split = transfer.handle
        self._look(split, self._begin(transfer))
        if split.refused and not split.parts:
            raise split.refused[0]
        return transfer

    def _look(self, work: _Split, transfer: Transfer) -> None:
        """Take pieces with all threads until it is time to return; then look at those that are under way."""
        until = time.monotonic() + SLICE_S
        helping = [
            self._pool.submit(work.take, lane, until) for lane in self._others if self._pool and work.rest
        ]
        try:
            work.take(self._first, until)
        finally:
            # A thread that has not begun by now finds nothing left, or would begin when it is time to return.
            wait(begun := [future for future in helping if not future.cancel()])
        for future in begun:
            future.result()
        for lane, part in work.parts:
            if part.state is State.PENDING:
                lane.poll(part)
                if time.monotonic() > until:
                    break
        transfer.backend = transfer.backend or next((part.backend for _, part in work.parts), "")
        if work.failure or work.done:
            work.rest.clear()
            self._end(transfer, work.failure)

    def _open_others(self, count: int) -> tuple[SelectingLane, ...]:
        """The other lanes, or none of them; on a thread of the pool, while this lane goes on."""
        opened: list[SelectingLane] = []
        try:
            for number in range(count):
                lane = self._opening(f"{self.name}.{number + 2}")
                opened.append(lane)
                for peer, known in self._peers.items():
                    lane.add(peer, known.metadata)
        except Exception as error:  # noqa: BLE001 - whatever it is, the first lane reads alone as it did so far
            _log.warning("reads by %s are not split: %s", self.name, error)
            while opened:
                with suppress(BackendError):  # nothing was ever posted on it
                    opened.pop().close()
        return tuple(opened)

    def _settle(self) -> None:
        """Wait for lanes that are being opened."""
        if self._coming is not None:
            self._others, self._coming = self._coming.result(), None

    def _close_others(self) -> None:
        while self._others:
            self._others[-1].close()
            self._others = self._others[:-1]


def split(
    name: str,
    backend: str,
    threads: int,
    opening: Callable[[str], LaneT],
    closed: Callable[[Any], None],
) -> LaneT | SplitLane:
    """A lane that splits reads between ``threads``, or for 1 the only one that ``opening`` makes."""
    return SplitLane(name, backend, threads, opening, closed) if threads > 1 else opening(name)


def _sound(rows: Descriptors) -> bool:
    """Whether rows can be split; others are for a lane to refuse, or to leave out those of no bytes."""
    return len(rows.local) == len(rows.remote) == len(rows) > 0 and int(rows.length.min()) > 0


def _posting(peer: str, rows: Descriptors, operation: Operation) -> _PostOn:
    return lambda lane: lane.submit(peer, rows, operation)


def _posting_selection(peer: str, selection: Selection | BlockSelection, operation: Operation) -> _PostOn:
    return lambda lane: lane.submit_selection(peer, selection, operation)


def _processors() -> int:
    """How many processors the calling thread, and so each that it starts, may run on."""
    return len(os.sched_getaffinity(0))
