"""What it costs a worker that peers read its memory: time that its own threads wait for a processor meanwhile.

With RDMA, NVLink, or copies by the reader, no thread of this process moves a byte. Over TCP a thread of the transfer
engine does. Where a processor is free for it that costs the engine nothing, and where none is it costs all of it. What
other processes of the engine wait for is not seen.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable

from kvd.backends.started_threads import TASKS

LOOK_SECONDS = 0.1
"""From one look at the serving threads to the next. Workers of a host look in the same step, as near as can be."""
LOOKS_COST = 0.002
"""How much of the time looks at all threads may take, while peers read: of a hundred one takes half a millisecond."""
FRESH_SECONDS, QUIET_SECONDS = 1.0, 10.0
"""So old may be what is known of all threads when a read begins, until so long after the last read."""
IDLE_SECONDS = 1.0
"""After so long without a step the engine had none to make. For a connector a step is over before its device is."""
LEAST_SHARE = 0.005
"""Of the time: who runs less for peers does so without them. NIXL's thread takes half of that."""
_RAN, _WAITED = 0, 1


class ReadCost:
    """Looks at this process's threads, of which ``serving`` move bytes for peers. Used in vLLM's step alone."""

    def __init__(self, serving: frozenset[int], tasks: str = TASKS) -> None:
        self._serving = serving
        self._tasks = tasks
        self._next = self._stepped = 0.0
        self._read = -math.inf  # when peers last did
        self._seen = 0.0  # when all were last seen
        self._at_rest = 0.0  # until when they are not looked at again
        self._counted = 0.0  # when what the serving threads ran was last counted
        self._ran = 0  # and how much that was
        self._waited: dict[int, int] = {}  # by each other thread then; of none where that is of no use

    def step(self, now: float) -> None:
        """A step begins, at ``now`` (time.monotonic())."""
        if now - self._stepped > IDLE_SECONDS:
            self._waited = {}

    def look(self, now: float) -> float:
        """Seconds since the last time that ``serving`` ran, and no more than all others waited. The step is over.

        0 where it is too early for another look, or the first one since the engine was idle; where nobody moves bytes;
        and where Linux does not tell (`/proc/self/task/*/schedstat`).
        """
        self._stepped = now
        if not self._serving or now < self._next:
            return 0.0
        self._next = (now // LOOK_SECONDS + 1) * LOOK_SECONDS
        ran_by_now = sum(self._times(self._serving, _RAN).values())
        ran, passed = ran_by_now - self._ran, now - self._counted
        reads = ran * 1e-9 >= LEAST_SHARE * passed
        if reads:
            self._read = now
        if now - self._read > QUIET_SECONDS or ran < 0:  # one of those that served has ended
            self._count(now, ran_by_now, {})
            return 0.0
        if now < self._at_rest or (not reads and now - self._seen < FRESH_SECONDS):
            return 0.0
        before, began = self._waited, time.thread_time()
        self._count(now, ran_by_now, self._times(self._others(), _WAITED))
        self._seen, self._at_rest = now, now + (time.thread_time() - began) / LOOKS_COST
        if not reads:
            return 0.0
        # The number of a thread that has ended may be another one's by now.
        waits = (max(0, self._waited[one] - before[one]) for one in before.keys() & self._waited)
        return min(ran, sum(waits)) * 1e-9

    def _count(self, now: float, ran: int, waited: dict[int, int]) -> None:
        self._counted, self._ran, self._waited = now, ran, waited

    def _others(self) -> list[int]:
        try:
            found = map(int, os.listdir(self._tasks))  # noqa: PTH208 - paths take as long as all else here
            return [one for one in found if one not in self._serving]
        except OSError:
            return []

    def _times(self, threads: Iterable[int], which: int) -> dict[int, int]:
        """Nanoseconds that each has run, or waited for a processor while it could have run."""
        times = {}
        for thread in threads:
            try:
                with open(f"{self._tasks}/{thread}/schedstat", "rb", 0) as file:  # noqa: PTH123 - as above
                    times[thread] = int(file.read(128).split()[which])
            except (OSError, ValueError, IndexError):  # it has just ended
                continue
        return times
