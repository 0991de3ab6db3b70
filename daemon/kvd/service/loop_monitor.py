"""Turns of the event loop: how long the daemon was busy with one round of work and answered nobody else."""

from __future__ import annotations

import asyncio
import selectors
import time
from dataclasses import dataclass

LONG_SECONDS = 0.01
"""A turn that is longer than this is counted."""
WINDOW_SECONDS = 30.0


@dataclass(slots=True)
class LoopMonitor:
    """Times of turns in seconds; ``began`` and ``window_began`` are time.monotonic(), ``began`` 0 before the first.

    ``busiest`` is the most processor time that one took: without what the machine gave to others in between. ``spent``
    is the thread's at the beginning of the turn.
    """

    longest: float = 0.0
    busiest: float = 0.0
    long: int = 0
    window_longest: float = 0.0
    window_before: float = 0.0
    window_began: float = 0.0
    began: float = 0.0
    spent: float = 0.0

    @property
    def recent(self) -> float:
        """The longest turn of the last 30 to 60 s."""
        return max(self.window_longest, self.window_before)

    def start(self, now: float, spent: float) -> None:
        """The loop has waited."""
        self.began, self.spent = now, spent

    def end(self, now: float, spent: float) -> None:
        """The loop is going to wait; times as of `start`."""
        took = now - self.began if self.began else 0.0
        if now - self.window_began > WINDOW_SECONDS:
            self.window_before, self.window_longest, self.window_began = self.window_longest, 0.0, now
        self.window_longest = max(self.window_longest, took)
        self.longest = max(self.longest, took)
        self.busiest = max(self.busiest, spent - self.spent if self.began else 0.0)
        self.long += took > LONG_SECONDS


def event_loop(turns: LoopMonitor) -> asyncio.AbstractEventLoop:
    """An event loop whose turns are measured, from one wait for I/O to the next."""
    selector = selectors.DefaultSelector()
    wait = selector.select

    def select(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        turns.end(time.monotonic(), time.thread_time())
        ready = wait(timeout)
        turns.start(time.monotonic(), time.thread_time())
        return ready

    selector.select = select  # type: ignore[method-assign]
    return asyncio.SelectorEventLoop(selector)
