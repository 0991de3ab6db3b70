"""Events: one PUB socket, a sequence number without gaps, counters next to it."""

from __future__ import annotations

import logging
import time
from collections import Counter

import msgspec
import zmq

from kvd.wire.event import KvdEvent

log = logging.getLogger(__name__)

Detail = str | int | float | bool | None


class Events:
    """Publishes what happens and counts it by kind. ``counters`` is shared with all that counts in this daemon."""

    def __init__(self, publisher: zmq.Socket[bytes] | None, counters: Counter[str]) -> None:
        self.counters = counters
        self.seq = 0
        self._publisher = publisher
        self._encoder = msgspec.msgpack.Encoder()

    def emit(self, kind: str, subject: str, **detail: Detail) -> None:
        """Publish one event. Never waits: a reader that is too slow loses events and sees the gap in ``seq``."""
        self.seq += 1
        self.counters[f"events.{kind}"] += 1
        event = KvdEvent(seq=self.seq, time=time.time(), kind=kind, subject=subject, detail=detail)
        log.info("%s %s %s", kind, subject, " ".join(f"{k}={v}" for k, v in detail.items()))
        if self._publisher is not None:
            self._publisher.send_multipart([kind.encode(), self._encoder.encode(event)], zmq.NOBLOCK)
