"""Which engines here drain, and when their leases are closed to further readers.

A drain is one life's of an engine: it ends with its scheduler. A scheduler that was told keeps it, and says so when it
registers, so a kvd that is started again knows. That all engines of the host drain is known to this kvd alone, and it
is told again after a start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvd.service.engines.lease_entry import LeaseEntry
from kvd.service.engines.leases import LeaseTable
from kvd.service.engines.local_engine import Client
from kvd.service.slices import spread


@dataclass(slots=True)
class Drain:
    """An engine drains, by the ``incarnation`` of its scheduler, since ``began``.

    Until ``closes`` it takes requests as ever; a lease of it that is opened late has ``grace`` seconds to be claimed.
    Times are time.monotonic().
    """

    incarnation: str
    grace: float
    began: float = field(default_factory=time.monotonic)
    closes: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """``closes`` follows from the others."""
        self.closes = self.began + self.grace

    @property
    def closed(self) -> bool:
        """Whether it takes nothing new."""
        return time.monotonic() >= self.closes


class DrainTable:
    """The engines that drain, by id. Methods are for the event loop."""

    def __init__(self, leases: LeaseTable) -> None:
        self.of: dict[str, Drain] = {}
        self.host: float | None = None
        """The grace of engines that come later, where all of the host are to drain."""
        self._leases = leases
        leases.on_opened = self._opened

    def begin(self, scheduler: Client, grace: float) -> Drain:
        """An engine drains from now on; one that does already is given no further time."""
        engine_id = scheduler.engine.engine_id
        known = self.of.get(engine_id)
        if known is not None and known.incarnation == scheduler.incarnation:
            if known.closes <= time.monotonic() + grace:
                return known
            grace = min(grace, known.grace)
        self.end(engine_id)
        drain = self.of[engine_id] = Drain(scheduler.incarnation, grace)
        drain.timer = asyncio.get_running_loop().call_later(grace, self._close_all, engine_id, drain)
        return drain

    def end(self, engine_id: str) -> None:
        """An engine takes requests again; leases that are closed, and were not ended, let readers in again."""
        drain = self.of.pop(engine_id, None)
        if drain is None:
            return
        if drain.timer is not None:
            drain.timer.cancel()
        for lease in self._leases_of(engine_id):
            if not lease.ending:
                lease.closed = ""

    def gone(self, client: Client) -> None:
        """A scheduler is no more, and its engine's drain with it."""
        drain = self.of.get(client.engine.engine_id)
        if drain is not None and drain.incarnation == client.incarnation:
            self.end(client.engine.engine_id)

    def refuses(self, engine_id: str) -> bool:
        """Whether an engine is to claim nothing new."""
        drain = self.of.get(engine_id)
        return drain is not None and drain.closed

    def close(self) -> None:
        """Forget all: kvd ends."""
        for engine_id in list(self.of):
            self.end(engine_id)

    def _leases_of(self, engine_id: str) -> Iterator[LeaseEntry]:
        for request_id in tuple(self._leases.requests_of(engine_id)):
            if (lease := self._leases.find((engine_id, request_id))) is not None:
                yield lease

    def _opened(self, lease: LeaseEntry) -> None:
        drain = self.of.get(lease.owner.engine.engine_id)
        if drain is not None:
            at = max(drain.closes, lease.opened + drain.grace)
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, at - time.monotonic()), self._close, lease, drain)

    def _close_all(self, engine_id: str, drain: Drain) -> None:
        """Those that are open since before the drain; others have a time of their own."""
        before = [lease for lease in self._leases_of(engine_id) if lease.opened <= drain.began]
        spread(before, lambda lease: self._close(lease, drain))

    def _close(self, lease: LeaseEntry, drain: Drain) -> None:
        engine_id = lease.owner.engine.engine_id
        if self.of.get(engine_id) is drain:
            self._leases.shut(lease, f"engine {engine_id!r} is draining")
