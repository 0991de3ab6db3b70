"""Loads of which nothing is announced yet: the thread's to announce or the watcher's to end, whoever is first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvd.worker.load import Load

NAMES_KEPT = 900.0
"""Seconds for which a transfer id must not come again: late words about the first would pass for the second's."""


class AdmissionQueue:
    """Used by the step, the thread and the watcher."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Load] = {}
        self._stopped = False
        self._names: dict[str, float] = {}

    def put(self, load: Load, hand_over: Callable[[Load], None]) -> bool:
        """Take a load and hand it over. False after `stop`."""
        with self._lock:
            if not self._stopped:
                self._waiting[id(load)] = load
                hand_over(load)
            return not self._stopped

    def stop(self) -> None:
        """Take no more."""
        with self._lock:
            self._stopped = True

    def holds(self, load: Load) -> bool:
        """Whether nobody has acquired it."""
        with self._lock:
            return id(load) in self._waiting

    def acquire(self, load: Load) -> bool:
        """Whether the load is the caller's from now on, to announce or to end."""
        with self._lock:
            return self._waiting.pop(id(load), None) is not None

    def acquire_late(self, now: float, *, everything: bool = False) -> list[Load]:
        """Acquire what is past its deadline, or ``everything``."""
        with self._lock:
            late = [load for load in self._waiting.values() if everything or now > load.deadline]
            for load in late:
                del self._waiting[id(load)]
        return late

    @property
    def deadlines(self) -> list[float]:
        """When what waits is late, time.monotonic() seconds."""
        with self._lock:
            return [load.deadline for load in self._waiting.values()]

    def name(self, transfer_id: str) -> bool:
        """Remember a transfer id, on the thread. False where it was used already."""
        now = time.monotonic()
        while self._names and now - next(iter(self._names.values())) > NAMES_KEPT:
            self._names.pop(next(iter(self._names)))
        if transfer_id in self._names:
            return False
        self._names[transfer_id] = now
        return True
