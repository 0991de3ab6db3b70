"""Which transfers are told of, and the bounded queue in which they wait for the collector."""

from __future__ import annotations

import queue
import time
import zlib
from collections import Counter

from kvd.service.config import TracingSettings
from kvd.service.engines.lease_entry import LeaseEntry
from kvd.service.tracing.spans import TransferSpan, of_lease, of_load, of_push
from kvd.wire.push import PushProgress, SentPart
from kvd.wire.transfer import TransferRecord

_TRACE = slice(3, 35)
"""Where the id of a trace stands in a `TraceParent`."""
EXPORTED, FAILED, DROPPED = "traced.exported", "traced.failed", "traced.dropped"
"""Counters of transfers."""
_ALL = 1 << 32
"""So many values a CRC-32 has."""


class Tracing:
    """Takes what happened, on the event loop; nothing here waits. Another thread empties ``waiting``.

    Counts what became of transfers: `DROPPED` are those that found no room.
    """

    def __init__(self, settings: TracingSettings, counters: Counter[str]) -> None:
        self.settings = settings
        self.counters = counters
        self.waiting: queue.Queue[TransferSpan | None] = queue.Queue(settings.queue)

    def load_ended(self, record: TransferRecord) -> None:
        """A load of a decoder here has ended, and belongs to a trace."""
        if self.samples(record.traceparent):
            self._put(of_load(record))

    def lease_ended(self, lease: LeaseEntry, end: str) -> None:
        """A prefiller here keeps blocks no longer, whose request belongs to a trace."""
        if self.samples(lease.traceparent):
            self._put(of_lease(lease, end, time.monotonic(), time.time()))

    def push_ended(self, progress: PushProgress, sent: SentPart) -> None:
        """A prefilling worker here has sent its part, or failed."""
        if self.samples(sent.traceparent):
            self._put(of_push(progress, sent))

    def samples(self, traceparent: str) -> bool:
        """Whether a trace that its caller samples is told of: every kvd with these settings decides alike.

        Not by the id's own bits: those of sampled traces are low ones already, where the caller went by them.
        """
        return bool(traceparent) and zlib.crc32(traceparent[_TRACE].encode()) < self.settings.sample * _ALL

    def _put(self, span: TransferSpan) -> None:
        try:
            self.waiting.put_nowait(span)
        except queue.Full:
            self.counters[DROPPED] += 1
