"""Whether the wall clock can be trusted to say how old a record is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

JUMP_SECONDS = 60.0
"""Further apart than this in one look the wall clock was set. NTP that slews it moves it by 0.5 ms a second at most."""


@dataclass(slots=True)
class SteadyClock:
    """The wall clock, and how long it has gone on without being set.

    ``wall`` is Unix time, ``steady`` a clock that nobody sets and that goes on while the machine sleeps. Records are
    deleted for their age only while the wall clock is steady. It is steady if nobody has set it by more than
    `JUMP_SECONDS`, either way, for as long as the caller wants. kvd's start counts as a setting. So a clock that is two
    weeks ahead for a moment deletes nothing. One that is ahead for good deletes after that time, and slowly.
    """

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    _apart: float | None = None
    _since: float = 0.0

    def look(self) -> tuple[float, float]:
        """The wall clock now, and seconds since it was set last, as far as that was looked at.

        Both are of one moment, so that what is judged by the first is trusted by the second. Look every few seconds.
        """
        now, wall = self.steady(), self.wall()
        apart = wall - now
        if self._apart is None or abs(apart - self._apart) > JUMP_SECONDS:
            self._since = now
        self._apart = apart
        return wall, now - self._since
