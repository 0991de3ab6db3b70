"""Work of an engine that nobody waits for, put off until the step that a load was for has been launched.

A thread that computes holds Python's lock, and vLLM launches a step's kernels under it. A load's record, and whatever
follows from it, took a third of a millisecond of the step that gives the first token.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvd.client.alarm import Alarm
from kvd.shown import logger

log = logger(__name__)

LATER_SECONDS = 0.01
"""By then a step that was about to be scheduled is launched, and a short one is over."""


class Later:
    """A thread that does what it is given `LATER_SECONDS` after it was given; it starts with the first."""

    def __init__(self) -> None:
        self._alarm = Alarm()
        self._works: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, work: Callable[[], None]) -> None:
        """Do this later; at once after `close`, and where the system starts no thread for it.

        Any thread may ask for it, none is woken for it now.
        """
        with self._lock:
            self._works.append(work)
            self._alarm.by(time.monotonic() + LATER_SECONDS)
            put_off = not self._closed and self._started()
        if not put_off:
            self.flush()

    def flush(self) -> None:
        """Do all of it now, on this thread."""
        while self._works:
            try:
                work = self._works.popleft()
            except IndexError:  # the other thread had it
                return
            try:
                work()
            except Exception:  # what is left has to be done all the same
                log.exception("something that was put off failed")

    def close(self, until: float) -> None:
        """Do all of it now; wait for the thread's end to time.monotonic() ``until``. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._alarm.now()
        if thread is not None:
            thread.join(max(0.0, until - time.monotonic()))
        if thread is None or not thread.is_alive():
            self._alarm.close()
        self.flush()

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvd-later", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while not self._closed:
            self._alarm.wait()
            self.flush()
