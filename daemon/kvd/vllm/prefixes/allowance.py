"""How much of an engine's time reads of its cache may still cost it."""

from __future__ import annotations

from typing import NamedTuple

MOST_SAVED = 0.01
"""Seconds that reads may cost at once after a while without them; a second's share, where that is more."""
LONGEST = 600.0
"""Seconds that what reads have cost keeps others from reading, at most: decoders' pulls cost it as well."""


class _Left(NamedTuple):
    """Seconds that were left at a time; below 0, reads have cost more than they may."""

    seconds: float
    at: float


class Allowance:
    """Grows by ``share`` of the time that goes by. Of two threads one may look while the other takes.

    What a read costs is known when it is over. So it may cost more than is left, and the next ones wait for that.
    """

    def __init__(self, share: float, now: float) -> None:
        """Times are time.monotonic() seconds."""
        self._share = share
        self._most = max(MOST_SAVED, share)
        self._left = _Left(MOST_SAVED, now)

    def left(self, now: float) -> float:
        """Seconds."""
        seconds, at = self._left
        return min(self._most, seconds + self._share * (now - at))

    def take(self, seconds: float, now: float) -> None:
        """Reads have cost so much since the last time."""
        self._left = _Left(max(self.left(now) - seconds, -self._share * LONGEST), now)
