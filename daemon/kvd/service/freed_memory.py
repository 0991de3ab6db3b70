"""Memory that kvd has freed goes back to the kernel.

After a pause of the machine kvd does the work of seconds at once. What that took is free again a moment later, but
glibc keeps it for the process, in holes between what is still used.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

LOOK_SECONDS = 20.0
GROWN_BYTES = 8 << 20
"""So much more than after the last time is worth some milliseconds in which nothing can be allocated."""


async def give_back(counters: Counter[str], seconds: float = LOOK_SECONDS) -> None:
    """Until cancelled: whenever kvd has grown, have glibc return what is free; another C library does it or not."""
    trim = _malloc_trim()
    settled = resident_bytes()
    while True:
        await asyncio.sleep(seconds)
        now = resident_bytes()
        settled = min(settled, now)
        if trim is None or now < settled + GROWN_BYTES:
            continue
        await asyncio.to_thread(trim, 0)  # without the GIL, so that only who allocates waits
        settled = resident_bytes()
        counters["memory.trims"] += 1


def resident_bytes() -> int:
    """RSS of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _malloc_trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
