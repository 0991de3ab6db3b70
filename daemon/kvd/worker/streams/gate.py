"""Loads that wait for their device: steps that are queued on its stream may still write to the blocks of a load.

What moves the bytes of a load, or zeroes blocks for it, knows nothing of that stream. Builds that do not ask which
groups a load fills (`KvdConnector.get_loaded_kv_cache_group_ids`) also queue the zeroing of its blocks there, which
could run over what was loaded.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from kvd.shown import logger
from kvd.worker.cause import SHUTTING_DOWN, Cause, from_error
from kvd.worker.load import Load
from kvd.worker.streams.event import StreamEvent

log = logger(__name__)

LOOK, PATIENCE = 100e-6, 100e-6
"""Seconds between two looks at an event, and how long a step that computes nothing looks at it itself."""


class StreamGate:
    """A thread that lets loads pass in order, each when its event is reached; it starts with the first.

    A load whose event comes sooner than its predecessor's waits for both. That costs it a part of a step.

    ``passed`` and ``refused`` are called on that thread, one of them for each load.
    """

    def __init__(self, passed: Callable[[Load], None], refused: Callable[[Load, Cause], None]) -> None:
        self._passed = passed
        self._refused = refused
        self._inbox: queue.Queue[tuple[Load, StreamEvent] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def is_open(self, event: StreamEvent, until: float = 0.0) -> bool:
        """Whether the device is there, as before most steps that compute nothing: no thread is needed.

        An idle device takes some microseconds to come to an event, so it is looked at ``until`` then,
        time.monotonic() seconds.
        """
        try:
            while not (there := event()) and time.monotonic() < until:
                pass
        except Exception:  # noqa: BLE001 - the thread meets it again, and says so
            return False
        return there

    def put(self, load: Load, event: StreamEvent) -> None:
        """Let it pass when ``event`` says so. Called by one thread, on which it is refused where no other can start."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvd-gate", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._refused(load, from_error(error, "the thread that waits for the device"))
                return
            self._thread = thread
        self._inbox.put((load, event))

    def close(self, until: float) -> None:
        """Refuse what has not passed; wait for the thread's end to time.monotonic() ``until``."""
        self._closing.set()
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            load, event = item
            try:
                cause = self._await(load, event)
            except Exception as error:  # the device's, and the thread must outlive it
                log.exception("waiting for the device before the load of %s", load.order.request_id)
                cause = from_error(error, "the device could not be asked")
            if cause:
                self._refused(load, cause)
            else:
                self._passed(load)

    def _await(self, load: Load, event: StreamEvent) -> Cause | None:
        """Why it must not begin, or nothing once the event is reached."""
        while not event():
            if self._closing.wait(LOOK):
                return SHUTTING_DOWN
            if load.dropped:
                return load.dropped
            if time.monotonic() > load.deadline:
                return Cause(f"the device was busy for its {load.seconds:.1f} s", "TOO_LATE")
        return None
