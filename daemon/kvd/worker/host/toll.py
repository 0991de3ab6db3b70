"""What it costs an engine that peers read its memory: time that its own threads wait for a processor meanwhile.

With RDMA, NVLink, or copies by the reader, no thread of this process moves a byte. Over TCP a thread of the transfer
engine does. Where a processor is free for it that costs the engine nothing, and where none is it costs all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvd.backends.started_threads import TASKS

LOOK_SECONDS = 0.1
"""From one look to the next."""
IDLE_SECONDS = 0.05
"""Between two steps: after more the engine had nothing to compute, and so nothing to wait for."""
LEAST_NS = 1_000_000
"""Where less was run for peers the other threads are not looked at: of a hundred that takes a millisecond."""


class _Times(NamedTuple):
    """Nanoseconds of a thread: that it ran, and that it waited for a processor while they could have run."""

    ran: int
    waited: int


class Toll:
    """Looks at this process's threads, of which ``movers`` serve peers. Used in vLLM's step alone."""

    def __init__(self, movers: frozenset[int], tasks: Path = Path(TASKS)) -> None:
        self._movers = movers
        self._tasks = tasks
        self._next = self._stepped = 0.0
        self._moved = 0
        self._waited: dict[int, int] | None = None
        """Of all other threads at the last look; None where the engine was idle since, or they were not looked at."""

    def step(self, now: float) -> None:
        """A step begins, at ``now`` (time.monotonic())."""
        if now - self._stepped > IDLE_SECONDS:
            self._waited = None

    def look(self, now: float) -> float:
        """Seconds since the last look that ``movers`` ran, and no more than all others waited. The step is over.

        0 where it is too early for another look, or the first one since the engine was idle; where nobody moves bytes;
        and where Linux does not tell (`/proc/self/task/*/schedstat`).
        """
        self._stepped = now
        if not self._movers or now < self._next:
            return 0.0
        self._next = now + LOOK_SECONDS
        moved = sum(times.ran for times in self._times(self._movers).values())
        ran = moved - self._moved
        if ran < LEAST_NS:
            return 0.0
        before, self._moved = self._waited, moved
        waited = {thread: times.waited for thread, times in self._times(self._others()).items()}
        self._waited = waited
        if before is None:
            return 0.0
        return min(ran, sum(waited[thread] - before[thread] for thread in before.keys() & waited)) * 1e-9

    def _others(self) -> list[int]:
        try:
            return [int(path.name) for path in self._tasks.iterdir() if int(path.name) not in self._movers]
        except OSError:
            return []

    def _times(self, threads: Iterable[int]) -> dict[int, _Times]:
        times = {}
        for thread in threads:
            try:
                ran, waited, _ = (self._tasks / str(thread) / "schedstat").read_text().split()
            except (OSError, ValueError):  # it has just ended
                continue
            times[thread] = _Times(int(ran), int(waited))
        return times
