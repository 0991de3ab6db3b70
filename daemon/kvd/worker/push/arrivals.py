"""Arrivals of one peer engine that are under way, and how each ends: reported when nothing of it can land any more.

Nothing of an arrival can land once every source has said so, or its window is closed, or it was never announced. Where
this side reads by itself: once its reads have ended.
"""

from __future__ import annotations

import functools
import threading
import time

from kvd.backends.errors import BackendError
from kvd.shown import logger
from kvd.worker.admission import AdmissionQueue
from kvd.worker.cause import Cause, from_error
from kvd.worker.context import WorkerContext
from kvd.worker.load import clear_leftover
from kvd.worker.push.announce import done, withdraw
from kvd.worker.push.arrival import Arrival, record_arrival
from kvd.worker.push.window import Windows

log = logger(__name__)

NAMES_KEPT = 900.0
"""Seconds for which a transfer id must not come again: late words about the first would pass for the second's."""


class Arrivals:
    """Used by one thread; `held` by others too."""

    def __init__(
        self, engine_id: str, context: WorkerContext, admission: AdmissionQueue, windows: Windows
    ) -> None:
        self._engine_id = engine_id
        self._context = context
        self._admission = admission
        self._windows = windows
        self._lock = threading.Lock()
        self._active: dict[str, Arrival] = {}  # by transfer id
        self._names: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._active)

    @property
    def all(self) -> list[Arrival]:
        """All that are under way now."""
        return list(self._active.values())

    @property
    def held(self) -> list[Arrival]:
        """The same and what waits for a window that could not be closed; on any thread."""
        with self._lock:
            return [*self._active.values(), *(arrival for arrival, _ in self._windows.unclosed.held)]

    def find(self, transfer_id: str) -> Arrival | None:
        """The arrival of that transfer."""
        return self._active.get(transfer_id)

    def has(self, arrival: Arrival) -> bool:
        """Whether it is still under way."""
        return self._active.get(arrival.key.transfer_id) is arrival

    def name(self, transfer_id: str) -> bool:
        """Remember a transfer id. False where it was used already."""
        now = time.monotonic()
        while self._names and now - next(iter(self._names.values())) > NAMES_KEPT:
            self._names.pop(next(iter(self._names)))
        if transfer_id in self._names:
            return False
        self._names[transfer_id] = now
        return True

    def take_up(self, arrival: Arrival, now: float) -> None:
        """It is to be announced."""
        with self._lock:
            self._active[arrival.key.transfer_id] = arrival
        arrival.reannounce(now)

    def forget(self, arrival: Arrival) -> None:
        """Somebody else has ended it."""
        with self._lock:
            self._active.pop(arrival.key.transfer_id, None)

    def acquire(self, arrival: Arrival) -> bool:
        """Whether it is ours to announce from now on. What nobody will write of its blocks is zeroed then.

        Not where somebody else has ended it, nor where its blocks could not be zeroed: then it has ended here.
        """
        load = arrival.load
        if not self._admission.acquire(load):
            self.forget(arrival)
            return False
        try:
            clear_leftover(load, arrival.plan, self._context.topology.worker)
        except Exception as error:  # nobody else can end the load from here on
            if not isinstance(error, BackendError):
                log.exception("zeroing blocks of the load of %s", load.order.request_id)
            self.forget(arrival)
            self._withdraw(arrival)
            self._context.ends.refuse(load, from_error(error))
            return False
        return True

    # --- ends ---

    def give_up(self, arrival: Arrival, cause: Cause) -> None:
        """A miss, to be reported when nothing of it can land any more: ask the sources to write no more.

        They are asked also where it was never announced: they keep blocks for somebody who would.
        """
        if arrival.cause or not self.has(arrival):
            return
        arrival.give_up(cause)
        self._withdraw(arrival)
        if self.settled(arrival):
            self.end(arrival, cause)

    def settled(self, arrival: Arrival) -> bool:
        """Whether nothing of it can land any more."""
        if not arrival.exposed:
            return True
        return not arrival.reading and (arrival.silent or not self._windows.possible)

    def end(self, arrival: Arrival, cause: Cause | None) -> None:
        """Report it: done, or a miss with that cause.

        What was never announced is done where nothing of it was to come to this worker, as to a context-parallel rank
        without a token of a short prompt. Its blocks are zeroed all the same, and its prefiller hears of it.
        """
        self.forget(arrival)
        if not arrival.announced:
            ours = self._admission.acquire(arrival.load) if cause else self.acquire(arrival)
            if not ours:
                return
            if not cause:
                self._withdraw(arrival)
        if not cause and not self._windows.possible and arrival.announced:
            done(self._context.session(), arrival.key)
        # For its checksums and its record; who refuses a load has none.
        arrival.load.pieces.plan = arrival.plan
        arrival.load.end(cause)
        try:
            self._context.ends.ended(arrival.load, functools.partial(record_arrival, arrival))
        except Exception:  # of whoever is told; the thread has other loads to end
            log.exception("end of the load of %s from %s", arrival.load.order.request_id, self._engine_id)

    def end_settled(self) -> None:
        """Report what was given up and cannot land any more."""
        for arrival in self.all:
            if arrival.cause and self.settled(arrival):
                self.end(arrival, arrival.cause)

    def end_all(self, why: Cause) -> None:
        """Give up whatever there is, and ask nobody."""
        for arrival in self._active.values():
            if not arrival.cause:
                arrival.give_up(why)
        self.drop_window()
        self.end_settled()

    def drop_window(self) -> None:
        """Close the window and end what is given up; all else that was announced on it is announced anew."""
        stands = self._windows.close()
        held = [arrival for arrival in self._active.values() if arrival.exposed]
        if not self._windows.possible:
            return
        if stands is None:
            for arrival in held:
                if arrival.cause:
                    self.end(arrival, arrival.cause)
                else:
                    arrival.reannounce(time.monotonic())
            return
        # Whatever was announced on it may still be written: nothing of it may be reported or announced again.
        window, error = stands
        with self._lock:
            self._windows.unclosed.hold(
                window, [(arrival, arrival.cause or Cause(error, "TRANSFER_FAILED")) for arrival in held]
            )
            for arrival in held:
                del self._active[arrival.key.transfer_id]
        for arrival in held:
            if not arrival.cause:
                self._withdraw(arrival)

    def retry_close(self, now: float) -> None:
        """Report what waited for a window that could be closed at last."""
        for arrival, cause in self._windows.unclosed.retry_close(now):
            self.end(arrival, cause)

    def _withdraw(self, arrival: Arrival) -> None:
        withdraw(self._context.session(), arrival.key, arrival.load.order.prefill.generation)
