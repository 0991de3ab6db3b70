"""Which engines here drain, and when their leases are closed to further readers.

A drain is one life's of an engine: it ends with its scheduler. A scheduler that was told keeps it, and says so when it
registers, so a kvd that is started again knows. That all engines of the host drain is known to this kvd alone, and it
is told again after a start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvd.service.deadlines import Deadlines
from kvd.service.engines.ended_leases import LeaseName
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
        self._closing: Deadlines[str] = Deadlines(self._close_all)
        """Engines, by when they take nothing new."""
        self._late: Deadlines[LeaseName] = Deadlines(self._close_late)
        """Leases that were opened during a drain, by when they are to be claimed."""
        leases.on_opened = self._opened
        leases.on_ended = self._late.discard

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
        self._closing.set(engine_id, drain.closes)
        return drain

    def end(self, engine_id: str) -> None:
        """An engine takes requests again; leases that are closed, and were not ended, let readers in again.

        Of many the rest does so in the next turns of the loop, unless another drain has closed them by then.
        """
        if self.of.pop(engine_id, None) is None:
            return
        self._closing.discard(engine_id)

        def reopen(lease: LeaseEntry) -> None:
            if not lease.ending and not self.refuses(engine_id):
                lease.closed = ""

        spread(self._leases_of(engine_id), reopen)

    def client_gone(self, client: Client) -> None:
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
        self.of.clear()
        self._closing.close()
        self._late.close()

    def _leases_of(self, engine_id: str) -> Iterator[LeaseEntry]:
        for request_id in tuple(self._leases.requests_of(engine_id)):
            if (lease := self._leases.find((engine_id, request_id))) is not None:
                yield lease

    def _opened(self, lease: LeaseEntry) -> None:
        engine_id = lease.owner.engine.engine_id
        drain = self.of.get(engine_id)
        if drain is not None:
            self._late.set((engine_id, lease.request_id), _closes(lease, drain))

    def _close_late(self, name: LeaseName) -> None:
        if (lease := self._leases.find(name)) is not None and (drain := self.of.get(name[0])) is not None:
            self._close(lease, drain)

    def _close_all(self, engine_id: str) -> None:
        """Those that are open since before the drain; others have a time of their own."""
        drain = self.of[engine_id]
        spread(self._leases_of(engine_id), lambda lease: self._close(lease, drain))

    def _close(self, lease: LeaseEntry, drain: Drain) -> None:
        """Close it, where it is that drain's to close by now."""
        engine_id = lease.owner.engine.engine_id
        if self.of.get(engine_id) is drain and _closes(lease, drain) <= time.monotonic():
            self._leases.shut(lease, f"engine {engine_id!r} is draining")


def _closes(lease: LeaseEntry, drain: Drain) -> float:
    return drain.closes if lease.opened <= drain.began else max(drain.closes, lease.opened + drain.grace)
