"""A thread that waits for events of a stream, and tells when the device has come to each.

Whoever looks at an event again and again takes Python's lock from the step that computes, each time. This thread takes
it once an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvd.shown import logger
from kvd.worker.inbox_thread import InboxThread, Rounds
from kvd.worker.streams.event import StreamEvent, wait_for

log = logger(__name__)

What = TypeVar("What")


class StreamWatch(Generic[What]):
    """Events in the order in which the device comes to them; the thread starts with the first."""

    def __init__(self, name: str, reached: Callable[[What], None]) -> None:
        """``reached`` is told of each event, on the thread; also of one that could not be waited for."""
        self._name = name
        self._reached = reached
        self._rounds = Rounds(lambda: None, self._wait, lambda: None, lambda _: None, lambda: None)
        self._thread: InboxThread[tuple[StreamEvent, What]] | None = None
        self._closing = False

    def put(self, event: StreamEvent, what: What) -> None:
        """Tell of ``what`` when the device has come to the event. Called by one thread; never waits.

        Nobody is told where the system starts no thread for it.
        """
        if self._closing:
            return
        if self._thread is None:
            try:
                self._thread = InboxThread(self._name, "waiting for the device", self._rounds)
            except RuntimeError as error:
                log.warning("the thread %s, which waits for the device: %s", self._name, error)
                return
        self._thread.put((event, what))

    def stop(self) -> None:
        """Tell of nothing more: begin that."""
        self._closing = True
        if self._thread is not None:
            self._thread.stop()

    def join(self, until: float) -> bool:
        """Wait for the thread's end to time.monotonic() ``until``. False where the device does not let it end."""
        return self._thread is None or self._thread.join(until - time.monotonic())

    def _wait(self, item: tuple[StreamEvent, What]) -> None:
        event, what = item
        if self._closing:
            return
        try:
            wait_for(event)
        except Exception:  # the device's; whoever is told meets it when they ask
            log.exception("waiting for the device")
        if not self._closing:
            self._reached(what)
