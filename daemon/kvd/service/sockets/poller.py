"""Waits for all connections at once and serves them in turn, for a bounded time each turn of the event loop."""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections import Counter
from typing import Protocol

from kvd.service.fairness.queue import FairQueue, Path
from kvd.service.sockets.limits import LEAST_TURN_SECONDS, TURN_SECONDS

log = logging.getLogger(__name__)

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
HUNG_UP = select.EPOLLHUP | select.EPOLLERR
MOST_EVENTS = 512
"""Connections with news that are taken note of in one turn; the kernel gives the others next time."""


class Member(Protocol):
    """What has a descriptor. ``mask`` is what the kernel has said of it since its last step.

    ``queued`` is the poller's.
    """

    path: Path
    mask: int
    queued: bool

    def step(self) -> bool:
        """Do one small piece of work, without waiting; whether there is more that needs no news of the kernel's."""


class Poller:
    """One epoll instance for all connections, read by one event loop."""

    # A reader of the loop's own for each connection would be called for all that have news, however many, in one turn.

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._epoll = select.epoll()
        self._members: dict[int, Member] = {}
        self._turns: FairQueue[Member] = FairQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon = False
        self._others_from = 0.0  # processor time

    async def run(self) -> None:
        """Serve until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._news)
        self._soon = True
        self._loop.call_soon(self._go_on)
        try:
            await self._loop.create_future()
        finally:
            self._loop.remove_reader(self._epoll.fileno())
            self._loop = None

    def close(self) -> None:
        """Let go of the epoll instance."""
        self._epoll.close()

    def add(self, fd: int, member: Member, mask: int) -> None:
        """Serve ``member`` when the kernel says that ``mask`` is so of its descriptor."""
        self._members[fd] = member
        self._epoll.register(fd, mask)

    def change(self, fd: int, mask: int) -> None:
        """Wait for something else."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        del self._members[fd]
        self._epoll.unregister(fd)

    def queue(self, member: Member) -> None:
        """Give ``member`` a step soon."""
        if member.queued:
            return
        member.queued = True
        self._turns.put(member.path, member)
        if not self._soon and self._loop is not None:
            self._soon = True
            self._loop.call_soon(self._go_on)

    def _news(self) -> None:
        if not self._soon:
            self._turn()

    def _go_on(self) -> None:
        self._soon = False
        self._turn()

    def _turn(self) -> None:
        if self._loop is None:
            return
        self._soon = True  # nothing of what is queued below needs a turn of its own yet
        try:
            for fd, mask in self._epoll.poll(0, MOST_EVENTS):
                if (told := self._members.get(fd)) is not None:
                    told.mask |= mask
                    self.queue(told)
            self._serve()
        finally:  # an error of this turn costs this turn, not all that follow
            self._soon = bool(self._turns)
            if self._soon:
                self._loop.call_soon(self._go_on)

    def _serve(self) -> None:
        """Give steps to those that are queued, until this turn's time is over."""
        # What was taken last may have left much to do for others on this loop: then less is taken now.
        others = time.thread_time() - self._others_from
        ends = time.monotonic() + min(
            TURN_SECONDS, max(LEAST_TURN_SECONDS, TURN_SECONDS**2 / max(others, 1e-9))
        )
        while (member := self._turns.take()) is not None:
            member.queued = False
            try:
                if member.step():
                    self.queue(member)
            except Exception:  # one connection must not end the loop for all
                self._counters["errors.socket"] += 1
                log.exception("a connection could not be served; going on")
            if time.monotonic() >= ends:
                break
        self._others_from = time.thread_time()
