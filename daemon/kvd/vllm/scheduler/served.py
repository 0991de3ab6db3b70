"""What became of each request's prompt: counted once a request, told to kvd while it changes.

An engine whose requests are quietly not handed over answers as well as one whose requests are. Only these counts tell
them apart (`kvctl doctor`, NOT_DISAGGREGATED).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from kvd.vllm.params import wants_prefill_here
from kvd.wire.frame import Message
from kvd.wire.outcomes import (
    ASKED_TO_PREFILL,
    MOST_COUNTS,
    OTHER,
    OTHER_PARAMS,
    Outcome,
    OutcomeCount,
    OutcomeKey,
    ReportOutcomes,
)

TELL_SECONDS = 2.0
"""What changes is told this much later, all at once."""


class Deliver(Protocol):
    """`kvd.client.session.KvdSession.deliver`."""

    def __call__(
        self, key: str, message: Callable[[], Message], keep_seconds: float, *, after: float
    ) -> Future[Message]:
        """Send until it is answered."""


class Served:
    """One scheduler's counts.

    The scheduler's step counts, the session's thread reads: the lock is held for operations on dictionaries only.
    """

    def __init__(self, engine_id: str, deliver: Deliver) -> None:
        self._engine_id = engine_id
        self._deliver = deliver
        self._lock = threading.Lock()
        self._totals: dict[OutcomeKey, tuple[int, int]] = {}
        self._sent: tuple[OutcomeCount, ...] = ()
        self._known: tuple[OutcomeCount, ...] = ()
        self._waits = False
        self._delivery: Future[Message] | None = None
        self._decided: set[str] = set()

    def plain(self, request_id: str, params: Mapping[str, Any] | None, tokens: int) -> None:
        """A request that brings no prefill and is none for another: ``tokens`` are computed here for itself."""
        other = ASKED_TO_PREFILL if wants_prefill_here(params) else OTHER_PARAMS if params else ""
        self.decided(request_id, "plain", tokens, other)

    def decided(self, request_id: str, outcome: Outcome, tokens: int, code: str = "") -> None:
        """Where a request's prompt comes from. The first word on a request counts, until it is forgotten."""
        if request_id not in self._decided:
            self._decided.add(request_id)
            self.count(outcome, tokens, code)

    def settle(self, request_id: str) -> None:
        """Of a request something else is counted: where its prompt comes from is not."""
        self._decided.add(request_id)

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        self._decided.discard(request_id)

    def count(self, outcome: Outcome, tokens: int, code: str = "") -> None:
        """One more request of an outcome, with so many tokens."""
        key: OutcomeKey = (outcome, code)
        with self._lock:
            if key not in self._totals and len(self._totals) >= MOST_COUNTS // 2:
                key = (outcome, OTHER)  # so there is room for this one of every outcome
            requests, before = self._totals.get(key, (0, 0))
            self._totals[key] = (requests + 1, before + max(0, tokens))
            waits, self._waits = self._waits, True
        if not waits:
            self._delivery = self._deliver("served", self._report, math.inf, after=TELL_SECONDS)
            self._delivery.add_done_callback(self._told)

    # --- on the session's thread ---

    def _report(self) -> ReportOutcomes:
        with self._lock:
            self._waits = False  # what is counted from here on is told by another message
            counts = [(key, *sums) for key, sums in self._totals.items()]
        self._sent = tuple(OutcomeCount(key[0], key[1], requests, tokens) for key, requests, tokens in counts)
        return ReportOutcomes(engine_id=self._engine_id, totals=self._sent, known=self._known)

    def _told(self, answer: Future[Message]) -> None:
        if answer.exception() is None:
            self._known = self._sent
        elif answer is self._delivery:  # and not one that a newer one took the place of
            self._waits = False
