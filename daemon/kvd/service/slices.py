"""Long work in slices, between which everybody else gets a turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from kvd.service.fairness.queue import FairQueue, Path

SLICE_SECONDS = 0.002
"""How long a slice may take: far below what a heartbeat or another client's question would notice."""

NOBODY: Path = ("", "")
"""Whose an answer is that nobody in particular asked for."""

T = TypeVar("T")


class Slices:
    """Answers that are long to make, one at a time: many askers do not make a turn longer, nor hold many answers.

    Users take turns, and the processes of each: who asks a thousand questions waits for nobody's but his own.
    """

    def __init__(self) -> None:
        self._making = False
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def collect(self, made: Iterable[T | None], whose: Path = NOBODY) -> list[T]:
        """What an iterator gives, without the Nones that it gives while it looks for the next.

        The loop turns meanwhile, so the iterator must bear that what it goes by changes between two items.
        """
        async with self.turn(whose):
            return [item async for item in paced(made) if item is not None]

    @asynccontextmanager
    async def turn(self, whose: Path = NOBODY) -> AsyncIterator[None]:
        """While it lasts nobody else's answer is made."""
        await self._acquire(whose)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, whose: Path) -> None:
        if not self._making:
            self._making = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(whose, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while (turn := self._waiting.take()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._making = False


async def paced(items: Iterable[T], most: int = 0) -> AsyncIterator[T]:
    """Items, with a turn of the loop for everybody else after each slice, or after each ``most`` of them."""
    ends, left = time.monotonic() + SLICE_SECONDS, most
    for item in items:
        yield item
        left -= 1
        if time.monotonic() >= ends or not left:
            await asyncio.sleep(0)
            ends, left = time.monotonic() + SLICE_SECONDS, most


def spread(items: Iterable[T], act: Callable[[T], None]) -> None:
    """Do something with each item, the first slice of it now and the rest in later turns of the loop.

    All that is spread shares one slice of a turn. With the last item all of it is let go, ``act`` and what that refers
    to. A function within this one that calls for itself would refer to itself: each worker that goes would be kept,
    with its card, until circles are looked for.
    """
    rest, more = iter(items), True
    try:
        more = _some(rest, act, time.monotonic() + SLICE_SECONDS)
    finally:  # also after an error: that of one item is none of the others'
        if more:
            loop = asyncio.get_running_loop()
            waiting = _WAITING.setdefault(loop, deque())
            waiting.append((rest, act))
            if len(waiting) == 1:
                loop.call_soon(_turn, loop)


_WAITING: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[tuple[Iterator[Any], Callable[[Any], None]]]] = (
    WeakKeyDictionary()
)
"""What is spread over the turns of each loop, the next one first. While there is any, a turn is due."""


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    waiting, ends = _WAITING[loop], time.monotonic() + SLICE_SECONDS
    try:
        while True:
            rest, act = waiting[0]
            if _some(rest, act, ends):
                waiting.rotate(-1)
                break
            waiting.popleft()
            if not waiting or time.monotonic() >= ends:
                break
    finally:
        if waiting:
            loop.call_soon(_turn, loop)


def _some(rest: Iterator[T], act: Callable[[T], None], ends: float) -> bool:
    """Items until that time, one at least; whether there may be more."""
    for item in rest:
        act(item)
        if time.monotonic() >= ends:
            return True
    return False
