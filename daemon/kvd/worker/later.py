"""Work of an engine that nobody waits for, put off until well behind the step that a load was for, and done together.

A thread that computes holds Python's lock, and vLLM launches a step's kernels under it. Right behind a load, its record
and what follows from it took a third of a millisecond of the step that gives the first token. Ten milliseconds later,
each load by itself, they took more of two later steps: what has none of its code in the processor's caches takes five
times as long, and each message takes two turns of threads.
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
TOGETHER_SECONDS = 0.1
"""From one time at which what was put off is done to the next. They are a host's: of the workers of one engine, whose
steps wait for each other, all do it in the same step."""
RESTS_SECONDS = 0.02
"""An engine that has made no step for so long has none to make, or a long one under way."""
PUT_OFF_SECONDS = 0.5
"""So long at most work is put off where one step follows the other."""
AT_ONCE = 32
"""Works, records for instance, that take no more than one step's time."""


def together(now: float) -> float:
    """When what is put off at time.monotonic() ``now`` is due: `LATER_SECONDS` after that at the soonest."""
    return ((now + LATER_SECONDS) // TOGETHER_SECONDS + 1) * TOGETHER_SECONDS


class Later:
    """A thread that does what it is given later, at a time when the engine rests if there is one; see `together`."""

    def __init__(self, done: Callable[[], None] = lambda: None) -> None:
        """``done`` is called after one or several works were done, on whatever thread that was."""
        self._done = done
        self._alarm = Alarm()
        self._works: deque[tuple[float, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.stepped = 0.0
        """When the engine last began a step (time.monotonic()); whoever knows sets it."""

    def put(self, work: Callable[[], None]) -> None:
        """Do this later; at once after `close`, and where the system starts no thread for it.

        Any thread may ask for it, none is woken for it now.
        """
        now = time.monotonic()
        with self._lock:
            self._works.append((now, work))
            self._alarm.by(together(now))
            put_off = not self._closed and self._started()
        if not put_off:
            self.flush()

    def flush(self) -> None:
        """Do all of it now, on this thread."""
        if self._works:
            self._flush(len(self._works))

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
        self._flush(len(self._works))  # the thread may be stuck in one work, and have done others

    def _flush(self, count: int) -> None:
        for _ in range(count):
            try:
                _, work = self._works.popleft()
            except IndexError:  # the other thread had it
                break
            self._do(work)
        self._do(self._done)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # what is left has to be done all the same
            log.exception("something that was put off failed")

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
            if count := self._count_due(now := time.monotonic()):
                self._flush(count)
            if self._works:
                self._alarm.by(together(now))

    def _count_due(self, now: float) -> int:
        """How many works to do now: none while one step follows the other, unless one has waited for long."""
        put = [at for at, _ in list(self._works)]
        steps = now - self.stepped < RESTS_SECONDS
        if not put or (steps and now - put[0] < PUT_OFF_SECONDS - TOGETHER_SECONDS):
            return 0
        # One that was put off just before may be of a step that is about to be launched.
        due = sum(at <= now - LATER_SECONDS for at in put)
        return min(due, max(AT_ONCE, due // 2)) if steps else due
