"""Keeps the ledger within its bounds: as much goes as came, in parts, while records come and when none do."""

from __future__ import annotations

import sqlite3
import time

from kvd.service.config import LedgerSettings
from kvd.service.ledger import store
from kvd.service.ledger.steady import SteadyClock

ROWS = 1000
"""Most records that one part deletes: what is reported meanwhile waits for it, some 20 ms."""
MORE_ROWS = 100
"""What a commit deletes beyond twice what it brought, so that what is too much becomes less even under full load."""
SECONDS = 10.0
"""How often the bounds are looked at while nothing is over them."""
STEADY_SECONDS = 3600.0
"""How long the clock must have gone on undisturbed before records go for their age."""
AGE_SECONDS = 60.0
"""How often some go for their age."""
AGE_SHARE, AGE_LEAST = 0.01, 10
"""How many at a time: this share of all, at least so many. A clock that stays wrong costs little each minute."""


ENGINES_SHARE = 0.25
"""Share of the bytes that descriptions of engines may take: those of a few large ones would push the records out."""


class Pruning:
    """What is to be deleted, and when. For the writer's thread.

    The bounds of rows and bytes are kept at any time. Age counts by `SteadyClock` alone, after `STEADY_SECONDS`, and
    takes at most `AGE_SHARE` of the records each `AGE_SECONDS`: a clock that is set wrong deletes nothing soon, and
    disks do not fill for want of it.
    """

    def __init__(self, clock: SteadyClock) -> None:
        self.more = False
        self._clock = clock
        self._at = 0.0
        self._age_at = 0.0
        self._engines_at = 0.0

    def hurry(self) -> None:
        """Look at once."""
        self._at = 0.0

    def with_commit(
        self, database: sqlite3.Connection, settings: LedgerSettings, total: int, came: int
    ) -> int:
        """Delete what a commit that brought ``came`` records to ``total`` takes beyond the rows; how many."""
        over = total + came - settings.max_rows
        if came == 0 or over <= 0:
            return 0
        return store.drop_oldest(database, min(over, 2 * came + MORE_ROWS))

    def part(self, database: sqlite3.Connection, settings: LedgerSettings, total: int) -> tuple[int, int]:
        """Delete the next records, where any are due: how many, and how many engines. Raises `sqlite3.Error`."""
        now = time.monotonic()
        wall, steady = self._clock.look()
        if not self.more and now < self._at:
            return 0, 0
        self._at, self.more = now + SECONDS, True  # should it fail the rest is still to be done
        with store.transaction(database):
            over = store.excess(database, settings, total)
            gone = store.drop_oldest(database, min(over, ROWS)) if over else 0
            if steady >= STEADY_SECONDS and now >= self._age_at:
                self._age_at = now + AGE_SECONDS
                most = min(ROWS, max(AGE_LEAST, int(total * AGE_SHARE)))
                gone += store.drop_older(database, wall - settings.max_age_seconds, most)
            engines = store.drop_unnamed_engines(database) if gone else 0
            if now >= self._engines_at:
                self._engines_at = now + AGE_SECONDS
                engines += store.drop_engines_beyond(database, int(settings.max_bytes * ENGINES_SHARE))
        self.more = 0 < gone < over
        return gone, engines
