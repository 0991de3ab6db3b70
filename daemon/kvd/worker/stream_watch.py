"""A thread that waits for events of a stream, and tells when the device has come to each.

Whoever looks at an event again and again takes Python's lock from the step that computes, each time. This thread takes
it once an event.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvd.shown import logger
from kvd.worker.stream_event import StreamEvent, wait_for

log = logger(__name__)

What = TypeVar("What")


class StreamWatch(Generic[What]):
    """Events in the order in which the device comes to them; the thread starts with the first."""

    def __init__(self, name: str, reached: Callable[[What], None]) -> None:
        """``reached`` is told of each event, on the thread; also of one that could not be waited for."""
        self._name = name
        self._reached = reached
        self._inbox: queue.Queue[tuple[StreamEvent, What] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, event: StreamEvent, what: What) -> None:
        """Tell of ``what`` when the device has come to the event. Called by one thread; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._inbox.put((event, what))

    def stop(self) -> None:
        """Tell of nothing more: begin that."""
        self._closing = True
        self._inbox.put(None)

    def join(self, until: float) -> bool:
        """Wait for the thread's end to time.monotonic() ``until``. False where the device does not let it end."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None and not self._closing:
            event, what = item
            try:
                wait_for(event)
            except Exception:  # the device's; whoever is told meets it when they ask
                log.exception("waiting for the device")
            if not self._closing:
                self._reached(what)
