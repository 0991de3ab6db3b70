"""What the decoding side tells of its readers when nobody asked for an answer: releases, and claims that kvd missed.

While a kvd is away a lease may be read by the prefiller's own statement of its time. The prefiller's kvd does not know
of such a reader. So no other reader of this scheduler is released before it, and a lease that this scheduler has
released is not read that way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import Literal

from kvd.wire.frame import Message
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.worker.session import SessionProtocol

Name = tuple[str, str]
"""Engine id and request id: whatever way they go, one lease."""
Result = Literal["done", "miss", "aborted"]
RELEASED_KEPT = 16_384
"""Leases that are remembered as released."""


class Releases:
    """The releases of one scheduler. Touched by the scheduler's step only."""

    def __init__(self, session: SessionProtocol, keep_seconds: float) -> None:
        self._session = session
        self._keep_seconds = keep_seconds
        self._by_clock: Counter[Name] = Counter()
        self._held: dict[Name, list[LeaseRelease]] = {}
        self._released: OrderedDict[Name, None] = OrderedDict()

    def was_released(self, key: LeaseKey) -> bool:
        """Whether a reader of this scheduler has released the lease, so that its blocks may be free."""
        return _name(key) in self._released or _name(key) in self._held

    def reads_by_clock(self, key: LeaseKey, reader: str, seconds: float) -> Future[Message]:
        """A reader goes by the prefiller's statement for ``seconds``; its claim is sent until a kvd has answered it."""
        self._by_clock[_name(key)] += 1
        return self._session.deliver(f"reader {reader}", LeaseClaim(key=key, reader=reader), seconds)

    def release(self, key: LeaseKey, reader: str, result: Result, *, by_clock: bool) -> None:
        """A reader needs the blocks no longer. It takes the place of its claim, where that still waits to be sent."""
        name, last = _name(key), LeaseRelease(key=key, reader=reader, result=result)
        if by_clock:
            self._by_clock[name] -= 1
        if self._by_clock[name] > 0:
            self._held.setdefault(name, []).append(last)
            return
        del self._by_clock[name]
        self._released[name] = None
        self._released.move_to_end(name)
        if len(self._released) > RELEASED_KEPT:
            self._released.popitem(last=False)
        for release in [*self._held.pop(name, []), last]:
            self._session.deliver(f"reader {release.reader}", release, self._keep_seconds)


def _name(key: LeaseKey) -> Name:
    return key.engine_id, key.request_id
