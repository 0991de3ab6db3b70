"""Events: one publisher, a sequence number without gaps, counters next to it."""

from __future__ import annotations

import logging
import time
from collections import Counter

import msgspec

from kvd.service.sockets.publisher import Publisher
from kvd.wire.event import KvdEvent

log = logging.getLogger(__name__)

WARNINGS = {"peer.down", "peer.impostor"}
"""Kinds that somebody may have to do something about."""

Detail = str | int | float | bool | None


class Events:
    """Publishes what happens and counts it by kind. ``counters`` is shared with all that counts in this daemon."""

    def __init__(self, publisher: Publisher | None, counters: Counter[str]) -> None:
        self.counters = counters
        self.seq = 0
        self._publisher = publisher
        self._encoder = msgspec.msgpack.Encoder()

    def emit(self, kind: str, subject: str, **detail: Detail) -> None:
        """Publish one event. Never waits: a reader that is too slow loses events and sees the gap in ``seq``."""
        self.seq += 1
        self.counters[f"events.{kind}"] += 1
        event = KvdEvent(seq=self.seq, time=time.time(), kind=kind, subject=subject, detail=detail)
        level = logging.WARNING if kind in WARNINGS else logging.INFO
        words = " ".join(f"{k}={v}" for k, v in detail.items() if v != "")
        log.log(level, "%s %s%s", kind, subject, f" {words}" if words else "")
        if self._publisher is not None and self._publisher.wanted:
            self._publisher.publish(kind.encode(), self._encoder.encode(event))
