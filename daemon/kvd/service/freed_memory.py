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
GROWN_BYTES = 2 << 20
"""So much more than after the last time is worth trims: each takes 0.4 ms of a kvd with 10,000 workers."""
LOOKS = 9
"""Trims after each growth, one a look: the first may come amid a burst, and what that took is freed over a minute."""


async def give_back(counters: Counter[str], seconds: float = LOOK_SECONDS) -> None:
    """Until cancelled: whenever kvd has grown, have glibc return what is free, and again at the next looks.

    Another C library does it or not.
    """
    trim = _malloc_trim()
    settled = resident_bytes()
    left = 0
    while True:
        await asyncio.sleep(seconds)
        now = resident_bytes()
        settled = min(settled, now)
        if now >= settled + GROWN_BYTES:
            left = LOOKS
        if trim is None or not left:
            continue
        await asyncio.to_thread(trim, 0)  # without the GIL, so that only who allocates waits
        settled = resident_bytes()
        left -= 1
        counters["memory.trims"] += 1


def resident_bytes() -> int:
    """RSS of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _malloc_trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
