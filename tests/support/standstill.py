"""Tells whether this machine stood still, so that no deadline meant anything.

A virtual one may, and so does a core for all others while processes yield it to each other (docs/connector.md).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Standstill:
    """A time in which a core that we may use ran nothing of ours: which core, when it ended (monotonic), seconds."""

    core: int
    ended: float
    seconds: float


@contextlib.contextmanager
def watching(least: float = 0.5) -> Iterator[list[Standstill]]:
    """The standstills of at least so many seconds, added to the list as each ends.

    A thread on each core sleeps and looks how long that took: one core can stand still while the others run.
    """
    found: list[Standstill] = []
    done = threading.Event()
    threads = [
        threading.Thread(target=_watch, args=(core, least, done, found), name=f"watch-{core}", daemon=True)
        for core in sorted(os.sched_getaffinity(0))
    ]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        done.set()
        for thread in threads:
            thread.join()


def lost_seconds(found: Iterable[Standstill]) -> float:
    """What the worst core lost in all: ten standstills of a second end as many deadlines as one of ten."""
    lost: dict[int, float] = {}
    for one in found:
        lost[one.core] = lost.get(one.core, 0.0) + one.seconds
    return max(lost.values(), default=0.0)


def _watch(core: int, least: float, done: threading.Event, found: list[Standstill]) -> None:
    with contextlib.suppress(OSError):  # a core that was taken from us since: any other will do
        os.sched_setaffinity(0, {core})  # of this thread alone
    while True:
        before = time.monotonic()
        if done.wait(LOOK_SECONDS):
            return
        ended = time.monotonic()
        if (seconds := ended - before - LOOK_SECONDS) >= least:
            found.append(Standstill(core, ended, seconds))
