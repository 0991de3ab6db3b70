"""What falls due when: one timer of the loop for all of it, and of what falls due at one moment a slice each turn.

A timer of the loop for each would do all that falls due at one moment in one turn: 65,000 leases, half a second.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvd.service.slices import SLICE_SECONDS

TICK_SECONDS = 0.02
"""Nothing is late by more than this, but for those that fall due with it."""

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """The times at which ``due`` is to be called, once for each name. Methods are for the event loop."""

    def __init__(self, due: Callable[[K], None]) -> None:
        self._due = due
        self._tick_of: dict[K, int] = {}
        self._names: dict[int, dict[K, None]] = {}
        """By tick; none is empty."""
        self._ticks: list[int] = []
        """A heap of all ticks that have names, and of some that no longer have any."""
        self._in_heap: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    def __len__(self) -> int:
        return len(self._tick_of)

    def set(self, name: K, at: float) -> None:
        """``name`` falls due at that time, by time.monotonic(), and not when it would have before."""
        self.discard(name)
        # What is due already is done in the next turn, not in up to a tick.
        tick = math.floor(at / TICK_SECONDS) if at <= time.monotonic() else math.ceil(at / TICK_SECONDS)
        self._tick_of[name] = tick
        self._names.setdefault(tick, {})[name] = None
        if tick not in self._in_heap:
            self._in_heap.add(tick)
            heapq.heappush(self._ticks, tick)
        self._wake()

    def discard(self, name: K) -> None:
        """It does not fall due, if it would have."""
        tick = self._tick_of.pop(name, None)
        if tick is None:
            return
        names = self._names[tick]
        del names[name]
        if not names:
            del self._names[tick]

    def close(self) -> None:
        """Nothing falls due any more."""
        self._tick_of.clear()
        self._names.clear()
        self._ticks.clear()
        self._in_heap.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._wakes_at = None, math.inf

    def _wake(self) -> None:
        if not self._ticks or self._wakes_at <= self._ticks[0]:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = self._ticks[0]
        seconds = max(0.0, self._wakes_at * TICK_SECONDS - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._turn)

    def _turn(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        ends = time.monotonic() + SLICE_SECONDS
        try:
            while self._ticks and self._ticks[0] * TICK_SECONDS <= time.monotonic():
                self._next()
                if time.monotonic() >= ends:
                    break
        finally:  # also after an error: that of one name is none of the others'
            self._wake()

    def _next(self) -> None:
        names = self._names.get(self._ticks[0])
        if names is None:
            self._in_heap.discard(heapq.heappop(self._ticks))
            return
        name, _ = names.popitem()
        del self._tick_of[name]
        if not names:
            del self._names[self._ticks[0]]
        self._due(name)
