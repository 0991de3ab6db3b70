"""An engine that is to take nothing new (`kvd.wire.drain`): what its scheduler knows of that, and what it still holds.

kvd tells it when, on the session's thread; the scheduler's step asks at each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvd.wire.drain import EngineHolds, SetDraining
from kvd.wire.frame import Message
from kvd.worker.cause import Cause

DECLINED = Cause("this engine is draining: it loads nothing for requests that come now", "DRAINING")
NOT_PUSHED = Cause("the prefiller is draining: it pushes nothing for requests that come now", "DRAINING")


class Draining:
    """Whether an engine drains. ``holds`` gives its pushes and loads under way, on any thread."""

    def __init__(self, holds: Callable[[], tuple[int, int]]) -> None:
        self._holds = holds
        self._closes: float | None = None
        self._prefills: set[str] = set()
        self._turned_away: set[str] = set()

    @property
    def on(self) -> bool:
        """Whether routers are to send nothing here any more; requests on their way are served as ever for a while."""
        return self._closes is not None

    @property
    def closed(self) -> bool:
        """Whether nothing new is taken."""
        closes = self._closes
        return closes is not None and time.monotonic() >= closes

    @property
    def left(self) -> float | None:
        """Seconds until nothing new is taken, None where the engine does not drain."""
        closes = self._closes
        return None if closes is None else max(0.0, closes - time.monotonic())

    # --- in the scheduler's step ---

    def told(self, compatibility_class: str) -> dict[str, Any]:
        """What a prefiller's params tell routers."""
        draining = {"kvd_draining": True} if self.on else {}
        return {"kvd_compatibility_class": compatibility_class, **draining}

    def takes(self, request_id: str) -> bool:
        """Whether a request that has come is prefilled here for a decoder. Else it is computed for nobody."""
        if request_id in self._turned_away or (self.closed and request_id not in self._prefills):
            self._turned_away.add(request_id)
            return False
        self._prefills.add(request_id)
        return True

    def over(self, request_id: str) -> bool:
        """A request has ended. Whether it was turned away."""
        self._prefills.discard(request_id)
        if request_id not in self._turned_away:
            return False
        self._turned_away.discard(request_id)
        return True

    # --- on the session's thread ---

    def asked(self, message: Message) -> Message | None:
        """Take kvd's word; what is held then. None for any other message."""
        if not isinstance(message, SetDraining):
            return None
        if message.seconds is None:
            self._closes = None
        else:
            closes = time.monotonic() + max(0.0, message.seconds)
            self._closes = closes if self._closes is None else min(closes, self._closes)
        pushes, loads = self._holds()
        return EngineHolds(prefills=len(self._prefills), pushes=pushes, loads=loads)
