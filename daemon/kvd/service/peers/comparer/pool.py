"""Comparing engines: in processes that can be ended, in fair turns, within a time that is known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvd.service.errors import RequestRefused
from kvd.service.peers.comparer.handle import ComparerProcess
from kvd.service.peers.comparer.messages import CPU_SECONDS, MEMORY_BYTES, Found
from kvd.wire.identity import Endpoint, EngineCard

log = logging.getLogger(__name__)

MOST_PROCESSES = 4
"""Most comparisons at a time. Each peer has one at most."""
SUSPECTS = 2
"""Most of them for peers of which a comparison was given up lately: the others are for everybody else."""
SUSPECT_SECONDS = 60.0
WALL_SECONDS = 15.0
"""One turn may take this long by the clock, on a machine that gives the process little of its `CPU_SECONDS`."""
START_SECONDS = 30.0
"""A process that has not imported what it needs by then is given up."""
AGAIN_SECONDS = 1.0
"""After a start that failed, nobody starts another for this long."""
MOST_PAUSE_SECONDS = 30.0
"""The longest pause between two starts of kvd's own accord."""
FROM_OUTSIDE = {-signal.SIGHUP, -signal.SIGINT, -signal.SIGQUIT, -signal.SIGKILL, -signal.SIGTERM}
"""How a process ends that somebody else ended: an operator, the kernel where memory is short. No card does that."""
MOST_WAITING = 256
"""Most comparisons that wait for one peer's turn: a host has some tens of engines."""


@dataclass(frozen=True, slots=True)
class Whose:
    """In whose line a pair waits: that of its peer's kvd and the users here, of one engine or, at this kvd, of both."""

    endpoint: Endpoint
    users: frozenset[int] = frozenset()

    @property
    def taker(self) -> Whose:
        """Whose turn it is then: another kvd has one at a time, whoever here asks."""
        return Whose(self.endpoint) if self.endpoint.host else self

    def __str__(self) -> str:
        if self.endpoint.host:
            return f"the kvd at {self.endpoint}"
        return "this host" + "".join(f", uid {uid}" for uid in sorted(self.users))


class Comparer(Protocol):
    """Who compares for the length of a turn."""

    async def shape(self, peer: EngineCard) -> Found:
        """The peer's shape: a digest of all that decides what it fits, without its id and addresses."""

    async def compare(self, local: EngineCard) -> Found:
        """The factors that fail between a local engine and the peer whose `shape` was asked for before."""


class ComparerPool:
    """The processes that compare, and who waits for one."""

    def __init__(self, counters: Counter[str]) -> None:
        self.trouble = ""
        """Why no process could be started when one was wanted last; empty where one could."""
        self._counters = counters
        self._waiting: OrderedDict[Whose, deque[asyncio.Future[None]]] = OrderedDict()
        self._running: set[Whose] = set()
        self._suspects: dict[Whose, float] = {}
        self._idle: list[ComparerProcess] = []
        self._all: set[ComparerProcess] = set()
        self._not_before = 0.0  # time.monotonic()

    async def start(self) -> None:
        """Have a process that is ready for the next comparison, where one can be started: else ``trouble`` says why."""
        with contextlib.suppress(RequestRefused):
            self._idle.append(await self._begin())

    async def keep_trying(self) -> None:
        """Until cancelled: start one again and again where none could be. Who would ask waits until kvd is ready."""
        pause = AGAIN_SECONDS
        while True:
            await asyncio.sleep(pause)
            if self.trouble:
                await self.start()
            pause = min(2 * pause, MOST_PAUSE_SECONDS) if self.trouble else AGAIN_SECONDS

    async def close(self) -> None:
        """End all processes, whatever they do."""
        for process in list(self._all):
            await self._end(process)

    @contextlib.asynccontextmanager
    async def turn(self, peer: Whose) -> AsyncIterator[Comparer]:
        """A process, when it is the peer's turn. Raises `RequestRefused` where it took too long, or none can be had."""
        await self._wait_for_turn(peer)
        process: ComparerProcess | None = None
        good = False
        try:
            process = await self._idle_one() or await self._begin()
            async with asyncio.timeout(WALL_SECONDS):
                yield process
            good = not process.spoilt
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await process.code() if process is not None else None
            if code in FROM_OUTSIDE:
                raise _unavailable(
                    f"the process that compares engines was ended from outside ({code})"
                ) from None
            raise self._given_up(peer, error) from None
        except (TimeoutError, msgspec.MsgspecError) as error:
            raise self._given_up(peer, error) from None
        finally:
            kept = good and (bool(self._waiting) or not self._idle)
            if process is not None and kept:
                self._idle.append(process)
            self._free(peer)
            if process is not None and not kept:
                await self._end(process)

    async def _idle_one(self) -> ComparerProcess | None:
        """A process that waits for work. Those that ended while they waited are no peer's doing."""
        while self._idle:
            process = self._idle.pop()
            if process.lives:
                return process
            log.warning("a process that compares engines ended while it had nothing to do")
            await self._end(process)
        return None

    def _given_up(self, peer: Whose, error: Exception) -> RequestRefused:
        self._counters["handshakes.comparisons_given_up"] += 1
        self._suspects[peer.taker] = time.monotonic() + SUSPECT_SECONDS
        log.warning(
            "comparing with an engine of %s was given up: %r",
            peer,
            error,
            extra={"code": "KVD-COMPARE-LIMIT"},
        )
        return RequestRefused(
            "KVD-COMPARE-LIMIT",
            f"comparing with an engine of {peer} took more than {CPU_SECONDS:g} s of processor time,"
            f" {WALL_SECONDS:g} s by the clock or {MEMORY_BYTES >> 20} MiB of memory",
            hint="no real engine takes that: look at its card with `kvctl describe-topology`",
        )

    async def _wait_for_turn(self, peer: Whose) -> None:
        queue = self._waiting.setdefault(peer, deque())
        if len(queue) >= MOST_WAITING:
            raise RequestRefused(
                "KVD-BUSY",
                f"{MOST_WAITING} comparisons with engines of {peer} are waiting already",
                hint="try again",
            )
        mine = asyncio.get_running_loop().create_future()
        queue.append(mine)
        self._next()
        try:
            await mine
        except asyncio.CancelledError:
            self._leave(peer, mine)
            if mine.done() and not mine.cancelled():
                self._free(peer)
            else:
                self._next()
            raise

    def _leave(self, peer: Whose, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.get(peer)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[peer]

    def _free(self, peer: Whose) -> None:
        """A peer's turn is over; its next one comes after those of others that wait."""
        self._running.discard(peer.taker)
        if peer in self._waiting:
            self._waiting.move_to_end(peer)
        self._next()

    def _next(self) -> None:
        """Give turns that are free: to each peer one, and then to the others before it gets another."""
        now = time.monotonic()
        self._suspects = {peer: until for peer, until in self._suspects.items() if until > now}
        for peer in list(self._waiting):
            if len(self._running) >= MOST_PROCESSES:
                return
            suspects = len(self._running & self._suspects.keys())
            taker = peer.taker
            if taker in self._running or (taker in self._suspects and suspects >= SUSPECTS):
                continue
            queue = self._waiting[peer]
            waiter = queue.popleft()
            if not queue:
                del self._waiting[peer]
            if not waiter.cancelled():
                waiter.set_result(None)
                self._running.add(taker)

    async def _begin(self) -> ComparerProcess:
        if time.monotonic() < self._not_before:
            raise _unavailable("kvd could not start the process that compares engines just now")
        process = None
        try:
            process = ComparerProcess()
            self._all.add(process)
            async with asyncio.timeout(START_SECONDS):
                await process.hello()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            before, self.trouble = self.trouble, f"no process to compare engines can be started: {error!r}"
            if self.trouble != before:
                log.error(  # noqa: TRY400 (the message says it all)
                    "%s: engines are introduced to none of other hosts; next: see that kvd's user may execute %s, and"
                    " that there is memory", self.trouble, sys.executable, extra={"code": "KVD-COMPARE-UNAVAILABLE"},
                )  # fmt: skip
            self._not_before = time.monotonic() + AGAIN_SECONDS
            if process is not None:
                await self._end(process)
            raise _unavailable(f"kvd cannot start the process that compares engines: {error!r}") from None
        except asyncio.CancelledError:
            if process is not None:
                await self._end(process)
            raise
        self._counters["handshakes.comparers_started"] += 1
        if self.trouble:
            log.warning("a process to compare engines can be started again")
        self.trouble = ""
        return process

    async def _end(self, process: ComparerProcess) -> None:
        self._all.discard(process)
        await process.end()


def _unavailable(what: str) -> RequestRefused:
    """What is no card's fault: the next question may find it mended."""
    return RequestRefused(
        "KVD-COMPARE-UNAVAILABLE",
        what,
        hint="ask again; if it stays, see the log of kvd: the process needs some 100 MiB of memory",
    )
