"""Lanes and windows that could not be closed: what was posted through one may still land, so it is held back.

Closing is tried again until it succeeds. Only then is what was held back reported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvd.shown import logger
from kvd.worker.watchdog import Activity

log = logger(__name__)

RETRY_SECONDS = 1.0
"""Seconds before closing is tried again."""

Held = TypeVar("Held")


class Closable(Protocol):
    """A lane or a window."""

    def close(self) -> None:
        """When this returns, nothing of it can land any more."""


@dataclass(slots=True)
class _Open(Generic[Held]):
    thing: Closable
    held: list[Held]
    retry_at: float


class Unclosed(Generic[Held]):
    """What one thread could not close yet. That thread calls the methods; any thread may look at the properties."""

    def __init__(self, name: str, activity: Activity) -> None:
        """``name`` is of what is closed, for messages; ``activity`` is told while it is being closed."""
        self._name = name
        self._activity = activity
        self._open: list[_Open[Held]] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def held(self) -> list[Held]:
        """All that is held back."""
        return [held for one in list(self._open) for held in one.held]

    @property
    def things(self) -> list[Closable]:
        """What could not be closed."""
        return [one.thing for one in list(self._open)]

    @property
    def due(self) -> list[float]:
        """When closing is tried again, in time.monotonic() seconds."""
        return [one.retry_at for one in list(self._open)]

    def close(self, thing: Closable) -> str:
        """Close a lane or a window. Why it still stands, or nothing."""
        try:
            with self._activity(f"closing {self._name}"):
                thing.close()
        except Exception as error:  # of any library
            log.exception("%s could not be closed", self._name)
            return f"{self._name} could not be closed: {error}"
        return ""

    def hold(self, thing: Closable, held: Sequence[Held] = ()) -> None:
        """Hold back what may land as long as ``thing`` is not closed."""
        self._open.append(_Open(thing, list(held), time.monotonic() + RETRY_SECONDS))

    def retry_close(self, now: float) -> list[Held]:
        """Close what is due; gives what need not wait any more."""
        freed: list[Held] = []
        for one in [one for one in self._open if now >= one.retry_at]:
            if self.close(one.thing):
                one.retry_at = time.monotonic() + RETRY_SECONDS
            else:
                self._open.remove(one)
                freed += one.held
        return freed
