"""The watcher of a worker's lanes: a thread that looks when something is due, and sleeps while nothing is held."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvd.client.alarm import Alarm
from kvd.shown import logger
from kvd.worker.load import Load

log = logger(__name__)

SHORTEST, AFTER_ERROR = 0.01, 1.0
"""Least seconds between two looks, and seconds after a look that failed."""
STUCK_AFTER = 2.0
"""Seconds past its deadline after which a posted load that is still not over is called stuck."""


class Activity:
    """What a thread does in its backend just now, for the watcher; ``now`` is empty where it does nothing there."""

    def __init__(self) -> None:
        self.now = ""

    @contextmanager
    def __call__(self, doing: str) -> Iterator[None]:
        """Say it for as long as the block runs."""
        before, self.now = self.now, doing
        try:
            yield
        finally:
            self.now = before


class Watch:
    """Calls ``look`` with time.monotonic(); it answers with the time of the next look, infinity for none.

    To be told of a time does not wake its thread: of loads that begin close together there is one look.
    """

    def __init__(self, look: Callable[[float], float]) -> None:
        self._look = look
        self._alarm = Alarm()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvd-watch", daemon=True)
        self._thread.start()

    def by(self, due: float) -> None:
        """Look by that time.monotonic() at the latest."""
        self._alarm.by(due)

    def close(self) -> None:
        """Look no more. Returns when the thread has ended."""
        self._closed = True
        self._alarm.now()
        self._thread.join()
        self._alarm.close()

    def _run(self) -> None:
        while True:
            self._alarm.wait()
            if self._closed:
                return
            try:
                due = self._look(time.monotonic())
            except Exception:  # nobody else sees to deadlines
                log.exception("the watcher of the lanes failed to look; it goes on")
                due = time.monotonic() + AFTER_ERROR
            if due < math.inf:
                self._alarm.by(max(due, time.monotonic() + SHORTEST))


def complain(load: Load, now: float, peer: str, doing: str) -> None:
    """Say that a posted load is past its deadline and cannot be ended; less and less often."""
    if now < load.complain_at:
        return
    past = now - load.deadline
    load.complain_at = now + past
    log.error(
        "load of %s from %s is %.0f s past its deadline and cannot be given up while its thread is busy %s."
        " Its bytes may still arrive, so its blocks stay in use and the request waits",
        load.order.request_id,
        peer,
        past,
        doing or "with others",
    )
