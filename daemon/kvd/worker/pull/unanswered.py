"""Loads that run beside their claim: what has ended is kept here until the scheduler says how the claim was answered.

Why bytes that were read before the answer may be used after it: `kvd.vllm.scheduler.beside`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvd.worker.cause import Cause
from kvd.worker.load import Load

REFUSED_SECONDS = 1.0
"""How long a read of a refused claim may go on. Then its lane is closed, and other loads of that lane start over."""


class Unanswered:
    """The loads that ended before the answer. Loads end on any thread, answers come in vLLM's step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[int, Callable[[], None]] = {}

    def keeps(self, load: Load, report: Callable[[], None]) -> bool:
        """Whether a load that has ended must not be reported yet; ``report`` is called once it may be.

        One of which no piece came is a miss whatever the answer is: nothing of it can be used.
        """
        with self._lock:
            if not load.unanswered or (load.cause and not load.pieces_done):
                return False
            self._ended[id(load)] = report
            return True

    def confirm(self, load: Load, seconds: float) -> None:
        """Its claim was confirmed: what came within ``seconds`` of its order may be used."""
        until = load.received + seconds
        load.deadline = min(load.deadline, until)
        # Whoever went by the deadline of before did so before now, so within the lease unless that is over.
        if until < time.monotonic() and not 0 < load.ended <= until:
            late = f"the lease on its blocks ended {seconds:.1f} s after the load was ordered, and it was not complete"
            load.refused = Cause(late, "LEASE_ENDED")
        self._pass(load)

    def refuse(self, load: Load, cause: Cause) -> None:
        """Its claim was refused: it is a miss of which nothing may be used, once nothing of it can land any more."""
        load.refused = cause
        load.dropped = load.dropped or cause  # so that it is not posted, if it was not
        load.deadline = min(load.deadline, time.monotonic() + REFUSED_SECONDS)
        self._pass(load)

    def give_up(self, load: Load) -> bool:
        """Nobody will use it, so no answer is waited for. Whether it had ended, and was reported now."""
        return self._pass(load, answered=False)

    def _pass(self, load: Load, *, answered: bool = True) -> bool:
        with self._lock:
            if answered and load.unanswered:
                load.answered = time.monotonic()
            load.unanswered = False
            report = self._ended.pop(id(load), None)
        if report is not None:
            report()
        return report is not None
