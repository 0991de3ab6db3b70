"""Memory that was freed goes back to the kernel once kvd has grown, and not before."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from kvd.service.freed_memory import give_back, resident_bytes

LOOK_SECONDS = 0.01
BURST_BYTES = 64 << 20
"""More than the process that runs the tests has free before."""


def test_holes_that_a_burst_left_are_returned() -> None:
    async def run() -> int:
        counters: Counter[str] = Counter()
        watching = asyncio.create_task(give_back(counters, LOOK_SECONDS))
        await asyncio.sleep(0)
        burst = [b"%4000d" % number for number in range(BURST_BYTES // 4000)]
        most = resident_bytes()
        kept = burst[::10]  # so the heap cannot shrink from its end
        del burst
        async with asyncio.timeout(10):
            while not counters["memory.trims"]:  # noqa: ASYNC110 (what is waited for is a number)
                await asyncio.sleep(LOOK_SECONDS)
        left = resident_bytes()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        return most - left if kept else 0

    assert asyncio.run(run()) > BURST_BYTES / 2


def test_a_trim_in_the_middle_of_a_burst_is_not_the_last_one() -> None:
    async def run() -> int:
        counters: Counter[str] = Counter()
        watching = asyncio.create_task(give_back(counters, LOOK_SECONDS))
        await asyncio.sleep(0)
        burst = [b"%4000d" % number for number in range(BURST_BYTES // 4000)]
        async with asyncio.timeout(10):
            while not counters["memory.trims"]:  # noqa: ASYNC110 (what is waited for is a number)
                await asyncio.sleep(LOOK_SECONDS)
            most = resident_bytes()
            kept = burst[::10]
            del burst
            while counters["memory.trims"] < 3:  # noqa: ASYNC110 (what is waited for is a number)
                await asyncio.sleep(LOOK_SECONDS)
        left = resident_bytes()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        return most - left if kept else 0

    assert asyncio.run(run()) > BURST_BYTES / 2


def test_without_growth_nothing_is_done() -> None:
    counters: Counter[str] = Counter()

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20 * LOOK_SECONDS):
                await give_back(counters, LOOK_SECONDS)

    asyncio.run(run())
    assert not counters
