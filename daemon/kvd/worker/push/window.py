"""What one peer engine writes into: one landing at a time, and those that could not be closed yet.

A landing is taken away like a lane. What was announced on one that cannot be closed may still be written, so it is held
back until it can be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvd.backends.contract import Home, Landing, LandingHome
from kvd.worker.cause import Cause
from kvd.worker.pull.reader import DESTROY_AGAIN
from kvd.worker.push.arrival import Arrival

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Undead:
    """A landing that could not be closed, and what may still be written through it, each with its cause."""

    landing: Landing
    arrivals: list[tuple[Arrival, Cause]]
    again: float


class Landings:
    """The landings of one peer engine, one after the other; ``number`` counts them, from 0.

    Used by one thread; ``busy`` is entered with what it is about to do in the backend. Where the backend has no
    landings there is never one, and the number stays 0.
    """

    def __init__(
        self, engine_id: str, home: Home, busy: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._engine_id = engine_id
        self._home: LandingHome | None = home if home.traits.lands and isinstance(home, LandingHome) else None
        self._busy = busy
        self._now: Landing | None = None
        self._undead: list[_Undead] = []
        self.number = -1 if self.possible else 0
        self.metadata = b""

    @property
    def possible(self) -> bool:
        """Whether peers can write here at all."""
        return self._home is not None

    @property
    def held(self) -> list[Arrival]:
        """What waits for a landing that could not be closed."""
        return [arrival for undead in list(self._undead) for arrival, _ in undead.arrivals]

    @property
    def due(self) -> list[float]:
        """When closing is tried again."""
        return [undead.again for undead in self._undead]

    def open(self) -> None:
        """See that there is a landing. Raises `BackendError` where none can be made."""
        if self._now is not None or self._home is None:
            return
        with self._busy("making a landing"):
            landing = self._home.landing(self._engine_id)
            try:
                self.metadata = landing.metadata()
            except Exception:  # whatever it is goes on to the caller
                self._close(landing)  # nobody was told of it
                raise
        self._now = landing
        self.number += 1

    def serve(self) -> bool:
        """Let bytes land. False where nothing is there to be served."""
        if self._now is None:
            return False
        with self._busy("serving its landing"):
            self._now.serve()
        return True

    def close(self) -> tuple[Landing, str] | None:
        """Close the landing of now. The landing and why it still stands, or None when nothing can land any more."""
        landing, self._now = self._now, None
        if landing is not None and (error := self._close(landing)):
            return landing, error
        return None

    def hold(self, landing: Landing, arrivals: list[tuple[Arrival, Cause]]) -> None:
        """Keep what was announced on a landing that could not be closed."""
        self._undead.append(_Undead(landing, arrivals, time.monotonic() + DESTROY_AGAIN))

    def bury(self, now: float) -> list[tuple[Arrival, Cause]]:
        """Try again to close what could not be closed; gives what need not wait any more."""
        freed: list[tuple[Arrival, Cause]] = []
        for undead in [u for u in self._undead if now >= u.again]:
            if self._close(undead.landing):
                undead.again = time.monotonic() + DESTROY_AGAIN
            else:
                self._undead.remove(undead)
                freed += undead.arrivals
        return freed

    def _close(self, landing: Landing) -> str:
        """Why the landing still stands, or nothing."""
        try:
            with self._busy("closing its landing"):
                landing.close()
        except Exception as error:
            log.exception("landing of %s could not be closed; it will be tried again", self._engine_id)
            return f"the landing of {self._engine_id} could not be closed: {error}"
        return ""
