"""Tells whether this machine stood still: a virtual one may for a minute, and no deadline means anything meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Standstill:
    """A time in which a core that we may use ran nothing of ours: which core, when it ended (monotonic), seconds."""

    core: int
    ended: float
    seconds: float


@contextlib.contextmanager
def watching(least: float = 2.0) -> Iterator[list[Standstill]]:
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
