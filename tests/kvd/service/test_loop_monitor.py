"""Turns of the event loop are measured from one wait to the next."""

from __future__ import annotations

import asyncio
import time

from kvd.service.loop_monitor import LONG_SECONDS, WINDOW_SECONDS, LoopMonitor, event_loop


def test_a_callback_that_is_busy_makes_a_long_turn_and_waiting_makes_none() -> None:
    turns = LoopMonitor()

    async def be_busy() -> None:
        await asyncio.sleep(5 * LONG_SECONDS)
        until = time.monotonic() + 2 * LONG_SECONDS
        while time.monotonic() < until:
            pass

    with asyncio.Runner(loop_factory=lambda: event_loop(turns)) as runner:
        runner.run(asyncio.sleep(0))
        before = turns.long
        runner.run(be_busy())
    assert turns.longest >= 2 * LONG_SECONDS
    assert turns.long > before
    assert turns.recent == turns.longest
    assert turns.busiest > 0


def test_what_is_recent_is_forgotten_and_the_longest_is_not() -> None:
    turns = LoopMonitor()
    turns.start(100.0, 7.0)
    turns.end(100.5, 7.25)
    assert turns.recent == 0.5
    for now in (100.6 + WINDOW_SECONDS, 100.7 + 2 * WINDOW_SECONDS):
        turns.start(now - 0.001, 8.0)
        turns.end(now, 8.001)
    assert turns.recent < 0.002
    assert (turns.longest, turns.busiest, turns.long) == (0.5, 0.25, 1)
