"""Tells kvd what this engine holds, whenever that changes: what is new, some times a second at most."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future

from kvd.client.errors import ClientError
from kvd.vllm.prefixes.boundaries import Boundaries
from kvd.wire.frame import Message
from kvd.wire.prefixes.hints import HintsTaken, TellHints
from kvd.worker.later import LATER_SECONDS
from kvd.worker.session import SessionProtocol

HINT_SECONDS = 0.25
"""The least time between two messages. What an idle engine has computed is told of right after its step."""


class HintTeller:
    """One scheduler's. `changed` is called in vLLM's step, the rest on the session's thread."""

    def __init__(self, engine_id: str, boundaries: Boundaries, session: SessionProtocol) -> None:
        self._engine_id, self._boundaries, self._session = engine_id, boundaries, session
        self._lock = threading.Lock()
        self._waits = False
        self._told_at = 0.0
        boundaries.on_change = self.changed

    def changed(self) -> None:
        """Something may have."""
        if not self._boundaries.untold:
            return
        with self._lock:
            waits, self._waits = self._waits, True
        if not waits:
            # Not at once, or it is composed within the step, of the first block that this touches.
            after = max(LATER_SECONDS, self._told_at + HINT_SECONDS - time.monotonic())
            sent = self._session.deliver("hints", self._message, math.inf, after=after)
            sent.add_done_callback(self._answered)

    def forgotten(self) -> None:
        """Kvd does not know us, and so nothing of what it was told."""
        self._boundaries.taken(0)
        self.changed()

    def _message(self) -> TellHints:
        self._told_at = time.monotonic()
        return TellHints(engine_id=self._engine_id, change=self._boundaries.change())

    def _answered(self, answer: Future[Message]) -> None:
        with self._lock:
            self._waits = False
        try:
            taken = answer.result()
        except ClientError:
            return  # the next change is told of, or the next kvd
        self._boundaries.taken(taken.version if isinstance(taken, HintsTaken) else 0)
        self.changed()
