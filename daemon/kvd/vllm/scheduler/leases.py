"""The prefilling side's leases: which finished requests' blocks are kept, and until when.

The scheduler owns them; kvd brokers. Two threads touch this: the scheduler's step and the session's, so the
table has a lock that is only ever held for a dictionary operation.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from kvd.wire.frame import Message
from kvd.wire.lease import LeaseClaimed, LeaseClosed, LeaseEnded, LeaseExtend, LeaseOpened
from kvd.wire.limits import MOST_LEASES_HELD, MOST_LEASES_OPENED
from kvd.wire.registration import OpenLease, OpenReader

Listed = TypeVar("Listed", OpenLease, OpenReader)


class Delivery(NamedTuple):
    """A message that kvd is to be sent until it answers, for ``seconds`` at most; the newer of two with one key."""

    key: str
    message: Callable[[], LeaseOpened]
    seconds: float


@dataclass(slots=True)
class Lease:
    """One request's blocks are kept until ``expires`` (time.monotonic() seconds).

    ``opening`` and ``traceparent`` as in `OpenLease`.
    """

    request_id: str
    expires: float
    blocks: int
    opening: int = 0
    traceparent: str = ""

    def left(self, now: float) -> OpenLease:
        """What remains of it."""
        left = max(0.0, self.expires - now)
        return OpenLease(self.request_id, left, self.blocks, self.opening, self.traceparent)


class Leases:
    """The open leases, and those that ended and wait for the next step to free their blocks."""

    def __init__(self, grace: float, expired: Callable[[], None] = lambda: None) -> None:
        """``expired`` is told of each lease that ended by its time."""
        self._grace = grace
        self._expired = expired
        self._lock = threading.Lock()
        self._open: dict[str, Lease] = {}
        self._ended: set[str] = set()
        self._openings = 0

    def open(self, request_id: str, seconds: float, blocks: int, now: float, traceparent: str = "") -> None:
        """Keep a request's blocks for ``seconds`` from ``now``."""
        with self._lock:
            self._openings += 1
            self._open[request_id] = Lease(request_id, now + seconds, blocks, self._openings, traceparent)

    def held(self, now: float) -> tuple[OpenLease, ...]:
        """All open leases with what remains of them, for a kvd that has to learn them again.

        Not those that ended and wait for the next step: they would be claimed again, and freed while they are read.
        """
        with self._lock:
            return tuple(x.left(now) for x in self._open.values() if x.request_id not in self._ended)

    def on_message(self, message: Message, now: float) -> Message | None:
        """Take kvd's word on a lease. Answers an extension with what now remains."""
        if isinstance(message, LeaseEnded):
            with self._lock:
                ended = self._is_open(message)
                if ended:
                    self._ended.add(message.request_id)
            if ended and message.end == "expired":
                self._expired()
            return None
        if isinstance(message, LeaseExtend):
            with self._lock:
                if not self._is_open(message):
                    return LeaseClaimed(
                        request_id=message.request_id, seconds=0.0, reason="the lease has ended"
                    )
                lease = self._open[message.request_id]
                lease.expires = max(lease.expires, now + message.seconds)
                return LeaseClaimed(request_id=message.request_id, seconds=lease.expires - now)
        return None

    def _is_open(self, message: LeaseEnded | LeaseExtend) -> bool:
        """Whether kvd speaks of a lease that is open, and not of an earlier one of that request id."""
        lease = self._open.get(message.request_id)
        if lease is None or message.request_id in self._ended:
            return False
        return message.opening in {0, lease.opening}

    def take_freed(self, now: float, closed: Callable[[Lease], None]) -> list[str]:
        """Requests whose blocks are to be freed now.

        ``closed`` is told of those that ended by our own clock.

        The own clock only decides when kvd did not: it waits ``grace`` seconds longer, so that whatever kvd
        promised a decoder is kept.
        """
        if not self._open:  # as ever on a decoder, which is asked in each step
            return []
        with self._lock:
            overdue = [
                x
                for x in self._open.values()
                if now > x.expires + self._grace and x.request_id not in self._ended
            ]
            freed = [*self._ended, *(x.request_id for x in overdue)]
            for request_id in freed:
                self._open.pop(request_id, None)
            self._ended.clear()
        for lease in overdue:
            self._expired()
            closed(lease)
        return freed

    def opened_message(self, engine_id: str, request_id: str, now: float) -> LeaseOpened:
        """The announcement of a lease, with what remains of it at the time of sending; empty once it has ended."""
        return LeaseOpened(engine_id=engine_id, leases=self._left((request_id,), now))

    def presented(self, engine_id: str, now: float) -> tuple[tuple[OpenLease, ...], list[Delivery]]:
        """The leases that a registration lists, and what is to be delivered after it where it has no room for all."""
        held = self.held(now)
        listed = longest(held)
        names = {lease.request_id for lease in listed}
        rest = [lease for lease in held if lease.request_id not in names]
        rest.sort(key=lambda lease: lease.seconds, reverse=True)
        deliveries = []
        for start in range(0, len(rest), MOST_LEASES_OPENED):
            batch = rest[start : start + MOST_LEASES_OPENED]
            message = partial(self._held_message, engine_id, tuple(lease.request_id for lease in batch))
            deliveries.append(Delivery(f"held leases {start}", message, batch[0].seconds))
        return listed, deliveries

    def _held_message(self, engine_id: str, request_ids: tuple[str, ...]) -> LeaseOpened:
        left = self._left(request_ids, time.monotonic())
        return LeaseOpened(engine_id=engine_id, leases=left, held=True)

    def _left(self, request_ids: Iterable[str], now: float) -> tuple[OpenLease, ...]:
        with self._lock:
            leases = (self._open.get(one) for one in request_ids if one not in self._ended)
            return tuple(lease.left(now) for lease in leases if lease is not None)

    @staticmethod
    def closed_message(engine_id: str, lease: Lease) -> LeaseClosed:
        """The notice that a lease ended by our own clock."""
        return LeaseClosed(
            engine_id=engine_id, request_id=lease.request_id, end="expired", opening=lease.opening
        )


def longest(kept: tuple[Listed, ...]) -> tuple[Listed, ...]:
    """As many as one registration holds, those that last longest."""
    if len(kept) <= MOST_LEASES_HELD:
        return kept
    return tuple(heapq.nlargest(MOST_LEASES_HELD, kept, key=lambda one: one.seconds))
