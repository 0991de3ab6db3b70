"""Loads that run beside their claim: what has ended is kept here until it is known how the claim was answered.

The scheduler says so with a step. That a claim was confirmed kvd tells workers too, as soon as it knows, unless the
scheduler has its only worker at hand. Why bytes that were read before the answer may be used after it:
`kvd.vllm.scheduler.beside`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvd.worker.cause import Cause
from kvd.worker.load import Load, Standing

REFUSED_SECONDS = 1.0
"""How long a read of a refused claim may go on. Then its lane is closed, and other loads of that lane start over."""
MOST_TOLD = 4096
"""Confirmations that are kept for loads which begin later, or never; of more the oldest are forgotten."""


class Unanswered:
    """The loads whose claim is open. They end on any thread; answers come in vLLM's step and on the session's thread.

    How a claim stands changes under one lock, and the report of a load that waited for that is called outside it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[int, Callable[[], None]] = {}
        self._readers: dict[str, Load] = {}
        self._told: OrderedDict[str, float] = OrderedDict()

    def begin(self, load: Load) -> None:
        """A load begins beside its claim; kvd may have told of that already."""
        with self._lock:
            seconds = self._told.pop(load.order.reader, None)
            if load.order.reader and seconds is None:
                self._readers[load.order.reader] = load
        if seconds is not None:
            self._confirm_told(load, seconds)

    def told(self, reader: str, seconds: float) -> None:
        """Kvd says that the claim of a reader was confirmed, for ``seconds`` from its sending."""
        with self._lock:
            load = self._readers.pop(reader, None)
            if load is None:
                self._told[reader] = seconds
                if len(self._told) > MOST_TOLD:
                    self._told.popitem(last=False)
        if load is not None:
            self._confirm_told(load, seconds)

    def keeps(self, load: Load, report: Callable[[], None]) -> bool:
        """Whether a load that has ended must not be reported yet; ``report`` is called once it may be.

        One of which no piece came is a miss whatever the answer is: nothing of it can be used.
        """
        with self._lock:
            if load.claim.standing is not Standing.OPEN or (load.cause and not load.pieces.done):
                self._readers.pop(load.order.reader, None)
                return False
            self._ended[id(load)] = report
            return True

    def confirm(self, load: Load, seconds: float, ago: float = 0.0) -> None:
        """Its claim was confirmed: what came within ``seconds`` of its order may be used. The first answer counts.

        It came so many seconds ``ago``.
        """
        until = load.times.received + seconds
        with self._lock:
            # Whoever went by the deadline of before did so before now, so within the lease unless that is over.
            if until < time.monotonic() and not 0 < load.times.ended <= until:
                late = f"the lease on its blocks ended {seconds:.1f} s after the load was ordered"
                ended = Cause(f"{late}, and it was not complete", "LEASE_ENDED")
                answered = load.claim.standing is Standing.OPEN and load.claim.stands(
                    Standing.REFUSED, ended, ago
                )
            else:
                answered = load.claim.stands(Standing.CONFIRMED, ago=ago)
            if not answered:
                return
            load.deadline = min(load.deadline, until)
            report = self._release(load)
        report()

    def refuse(self, load: Load, cause: Cause, ago: float = 0.0) -> None:
        """Its claim was refused: it is a miss of which nothing may be used, once nothing of it can land any more."""
        with self._lock:
            load.claim.stands(Standing.REFUSED, cause, ago)
            load.drop(cause)  # so that it is not posted, if it was not
            load.deadline = min(load.deadline, time.monotonic() + REFUSED_SECONDS)
            report = self._release(load)
        report()

    def give_up(self, load: Load) -> bool:
        """Nobody will use it, so no answer is waited for. Whether it had ended, and was reported now."""
        with self._lock:
            load.claim.stands(Standing.FORGONE)
            report = self._release(load)
        report()
        return report is not _nothing

    def _confirm_told(self, load: Load, seconds: float) -> None:
        left = seconds - load.order.asked_before
        if load.times.received + left > time.monotonic():  # else the scheduler says what is to become of it
            self.confirm(load, left)

    def _release(self, load: Load) -> Callable[[], None]:
        """Forget a load whose claim is open no longer; gives its report where that has waited."""
        self._readers.pop(load.order.reader, None)
        return self._ended.pop(id(load), _nothing)


def _nothing() -> None:
    """The report of a load that is still under way: nothing."""
