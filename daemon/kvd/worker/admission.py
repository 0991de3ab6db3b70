"""Loads of which nothing is posted or announced: the thread's to begin or the watcher's to end, whoever is first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvd.worker.load import Load


class AdmissionQueue:
    """Used by the step, the thread and the watcher; under its ``lock`` several things are done as one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiting: dict[int, Load] = {}
        self._stopped = False

    def put(self, load: Load, hand_over: Callable[[Load], None]) -> bool:
        """Take a load and hand it over. False after `stop`."""
        with self.lock:
            if not self._stopped:
                self._waiting[id(load)] = load
                hand_over(load)
            return not self._stopped

    def put_back(self, loads: Iterable[Load]) -> None:
        """What was acquired waits again."""
        with self.lock:
            self._waiting.update((id(load), load) for load in loads)

    def stop(self) -> None:
        """Take no more."""
        with self.lock:
            self._stopped = True

    def holds(self, load: Load) -> bool:
        """Whether nobody has acquired it."""
        with self.lock:
            return id(load) in self._waiting

    def acquire(self, load: Load) -> bool:
        """Whether the load is the caller's from now on, to begin or to end."""
        with self.lock:
            return self._waiting.pop(id(load), None) is not None

    def acquire_late(self, now: float) -> list[Load]:
        """Acquire what is past its deadline."""
        with self.lock:
            return [load for load in [*self._waiting.values()] if now > load.deadline and self.acquire(load)]

    def acquire_all(self) -> list[Load]:
        """Acquire everything that waits."""
        with self.lock:
            return [load for load in [*self._waiting.values()] if self.acquire(load)]

    def __len__(self) -> int:
        """How many wait; on any thread."""
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    @property
    def deadlines(self) -> list[float]:
        """When what waits is late, time.monotonic() seconds."""
        with self.lock:
            return [load.deadline for load in self._waiting.values()]
