"""The lease table: which blocks prefillers keep, for which readers, until when.

A lease ends with its last reader, or by its time. A kvd that inherits a lease from one that was killed cannot know who
reads under it: until the time that the other one may have promised, nobody's release ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvd.service.config import LeaseSettings
from kvd.service.engines.local_engine import Client
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.sockets.events import Detail, Events
from kvd.wire.frame import Message
from kvd.wire.lease import (
    LeaseClaim,
    LeaseClaimed,
    LeaseClosed,
    LeaseEnd,
    LeaseEnded,
    LeaseExtend,
    LeaseRelease,
)
from kvd.wire.registration import OpenLease

ENDED_KEPT = 10_000
ENDED_KEPT_SECONDS = 120.0
MAX_READERS = 4096
"""Most readers that a lease may ever have."""
INHERITED = ""
"""Stands for the readers that another kvd may have let in. No reader has this id."""

Send = Callable[[bytes, Message], None]
Ask = Callable[[bytes, Message, float], Awaitable[Message]]
Name = tuple[str, str]
"""Engine id and request id."""


@dataclass(slots=True)
class LeaseEntry:
    """Blocks that ``owner``, a scheduler, keeps until ``expires`` (time.monotonic()).

    ``readers`` are those that claimed it and have not released it, with the time until which they may read. ``gone``
    are those that released it: what they sent before may arrive after.
    """

    owner: Client
    request_id: str
    blocks: int
    expires: float
    timer: asyncio.TimerHandle
    readers: dict[str, float] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


class LeaseTable:
    """All leases of the local engines. Methods are for the event loop."""

    def __init__(
        self, settings: LeaseSettings, events: Events, outcomes: OutcomeCounts, send: Send, ask: Ask
    ) -> None:
        self.settings = settings
        self.table: dict[Name, LeaseEntry] = {}
        self._events = events
        self._outcomes = outcomes
        self._send = send
        self._ask = ask
        self._ended: OrderedDict[Name, float] = OrderedDict()

    def open(self, owner: Client, leases: tuple[OpenLease, ...]) -> None:
        """The owner opened leases, or says again how long they last."""
        engine_id = owner.engine.engine_id
        new = [lease.request_id for lease in leases if (engine_id, lease.request_id) not in self.table]
        self._outcomes.opened(engine_id, new, time.monotonic())
        for lease in leases:
            self._ended.pop((engine_id, lease.request_id), None)
            self._hold(owner, lease)

    def present(self, owner: Client, leases: tuple[OpenLease, ...]) -> None:
        """The owner registered (again) and lists all it holds: what ended here while it was away ends there now."""
        engine_id = owner.engine.engine_id
        listed = {lease.request_id for lease in leases}
        for name in [n for n in self.table if n[0] == engine_id and n[1] not in listed]:
            self._remove(name)
        for lease in leases:
            if (engine_id, lease.request_id) in self._ended:
                self._send(owner.route, LeaseEnded(request_id=lease.request_id, end="released"))
            else:
                self._hold(owner, lease, inherited=True)

    def count(self, engine_id: str) -> int:
        """Open leases of an engine."""
        return sum(name[0] == engine_id for name in self.table)

    def readers(self) -> int:
        """Readers of all open leases that are known by name."""
        return sum(reader != INHERITED for lease in self.table.values() for reader in lease.readers)

    async def claim(self, claim: LeaseClaim) -> LeaseClaimed:
        """How long the blocks are certain to be kept, after asking the owner for more where that is wanted."""
        received = time.monotonic()
        name, reader = (claim.key.engine_id, claim.key.request_id), claim.reader
        self._outcomes.claimed(*name)
        lease = self.table.get(name)
        if lease is None:
            why = "released" if name in self._ended else "expired, or never opened"
            reason = f"engine {name[0]!r} holds no lease {name[1]!r}: {why}"
            return _none(name, reason, ended=name in self._ended)
        if reader in lease.gone:
            return _none(name, f"reader {reader} has released lease {name[1]!r}", ended=True)
        if reader not in lease.readers and len(lease.readers) + len(lease.gone) >= MAX_READERS:
            return _none(name, f"lease {name[1]!r} had {MAX_READERS} readers: no more are let in")
        self._events.counters["leases.renewals" if reader in lease.readers else "leases.claims"] += 1
        # Before anything is waited for: another reader may go meanwhile.
        lease.readers[reader] = lease.expires
        reason = ""
        wanted = min(claim.extend_seconds, self.settings.max_seconds)
        if wanted > lease.expires - received - self.settings.margin_seconds:
            reason = await self._extend(name, lease.owner, wanted + self.settings.margin_seconds)
        lease = self.table.get(name)
        if lease is None or reader not in lease.readers:
            return _none(name, reason or "the lease ended meanwhile", ended=True)
        lease.readers[reader] = lease.expires
        # What is counted from the claim's sending, which was before `received`, ends before the lease does.
        seconds = max(0.0, lease.expires - received - self.settings.margin_seconds)
        return LeaseClaimed(request_id=name[1], seconds=seconds, reason=reason)

    def release(self, release: LeaseRelease) -> None:
        """A reader needs the blocks no longer; with the last one the lease ends. An unknown lease is no error."""
        name, reader = (release.key.engine_id, release.key.request_id), release.reader
        self._outcomes.claimed(*name)
        lease = self.table.get(name)
        if lease is None or reader in lease.gone:
            self._events.counters["leases.releases_repeated"] += 1
            return
        self._events.counters["leases.releases"] += 1
        lease.readers.pop(reader, None)  # where its claim was lost on the way it is not there
        if len(lease.readers) + len(lease.gone) < MAX_READERS:  # one that was let in always finds its place
            lease.gone.add(reader)
        left = max(lease.readers.values(), default=0.0)
        if left <= time.monotonic():
            self._remember_end(name)
            self._end(name, "aborted" if release.result == "aborted" else "released", release.result)
        elif left < lease.expires:
            self._keep_until(name, lease, left)

    def closed(self, closed: LeaseClosed) -> None:
        """The owner freed the blocks by itself."""
        name = (closed.engine_id, closed.request_id)
        if name in self.table:
            self._remove(name)
            self._emit(closed.end, name, by="owner")

    def owner_gone(self, owner: Client) -> None:
        """The owner died: nobody keeps its blocks."""
        for name, lease in list(self.table.items()):
            if lease.owner.incarnation == owner.incarnation:
                self._remove(name)
                self._emit("owner_gone", name, by="kvd", reason="its scheduler is gone")

    def close(self) -> None:
        """Drop all without a word: a kvd that ends does not end leases."""
        for name in list(self.table):
            self._remove(name)

    def _hold(self, owner: Client, lease: OpenLease, *, inherited: bool = False) -> None:
        name = (owner.engine.engine_id, lease.request_id)
        seconds = min(max(lease.seconds, 0.0), self.settings.max_seconds)
        older = self.table.get(name)
        if older is not None:
            older.timer.cancel()
        expires = time.monotonic() + seconds
        timer = asyncio.get_running_loop().call_later(seconds, self._expired, name)
        held = self.table[name] = LeaseEntry(owner, lease.request_id, lease.blocks, expires, timer)
        if older is not None:
            held.readers, held.gone = older.readers, older.gone
            return
        if inherited:
            held.readers[INHERITED] = expires
        self._emit("opened", name, seconds=seconds, blocks=lease.blocks, inherited=inherited)

    async def _extend(self, name: Name, owner: Client, seconds: float) -> str:
        sent = time.monotonic()
        request = LeaseExtend(request_id=name[1], seconds=seconds)
        try:
            answer = await self._ask(owner.route, request, self.settings.confirm_seconds)
        except TimeoutError:
            return f"its scheduler did not confirm within {self.settings.confirm_seconds:g} s; this is what is left"
        if not isinstance(answer, LeaseClaimed):
            return (
                f"its scheduler did not confirm: {getattr(answer, 'message', answer)}; this is what is left"
            )
        lease = self.table.get(name)
        if lease is None:
            return ""
        if answer.seconds <= 0:
            self._remove(name)
            return answer.reason or "its scheduler holds the lease no longer"
        self._keep_until(name, lease, sent + min(answer.seconds, self.settings.max_seconds))
        self._emit("extended", name, seconds=answer.seconds)
        return answer.reason

    def _keep_until(self, name: Name, lease: LeaseEntry, expires: float) -> None:
        lease.timer.cancel()
        lease.expires = expires
        seconds = max(0.0, expires - time.monotonic())
        lease.timer = asyncio.get_running_loop().call_later(seconds, self._expired, name)

    def _expired(self, name: Name) -> None:
        self._end(name, "expired", "")

    def _end(self, name: Name, end: LeaseEnd, result: str) -> None:
        lease = self._remove(name)
        self._send(lease.owner.route, LeaseEnded(request_id=name[1], end=end))
        self._emit(end, name, by="kvd", result=result, readers=len(lease.readers) + len(lease.gone))

    def _emit(self, what: str, name: Name, **detail: Detail) -> None:
        self._events.counters[f"leases.{what}"] += 1
        self._events.emit(f"lease.{what}", name[1], engine=name[0], **detail)

    def _remove(self, name: Name) -> LeaseEntry:
        lease = self.table.pop(name)
        lease.timer.cancel()
        return lease

    def _remember_end(self, name: Name) -> None:
        # The owner may be away just now: it is told when it comes back and still lists the lease.
        now = time.monotonic()
        self._ended[name] = now
        self._ended.move_to_end(name)
        while self._ended and (
            len(self._ended) > ENDED_KEPT or next(iter(self._ended.values())) < now - ENDED_KEPT_SECONDS
        ):
            self._ended.popitem(last=False)


def _none(name: Name, reason: str, *, ended: bool = False) -> LeaseClaimed:
    return LeaseClaimed(request_id=name[1], seconds=0.0, reason=reason, ended=ended)
