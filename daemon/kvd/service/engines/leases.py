"""The lease table: which blocks prefillers keep, for which readers, until when.

A lease ends with its last reader, or by its time. A kvd that inherits a lease from one that was killed cannot know who
reads under it: until the time that the other one may have promised, nobody's release ends it.

Whose a reader is, and what follows from that, stands in `kvd.service.engines.claimant`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet

import msgspec

from kvd.service.config import LeaseSettings
from kvd.service.deadlines import Deadlines
from kvd.service.engines.claimant import Claimant
from kvd.service.engines.ended_leases import EndedLeases, LeaseName
from kvd.service.engines.lease_entry import INHERITED, LeaseEntry, PresentedLease, claim_of_nothing
from kvd.service.engines.lease_room import LeaseRoom
from kvd.service.engines.local_engine import Client
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally
from kvd.service.slices import spread
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

MAX_HELD = 131_072
"""Most readers of one claimant on all leases: 64 decoders of a host with 2,048 requests each."""

OpenLeases = tuple[OpenLease, ...]
Send = Callable[[bytes, Message], None]
Ask = Callable[[bytes, Message, float], Awaitable[Message]]


class LeaseTable:
    """All leases of the local engines. Methods are for the event loop; ``on_`` hooks are told of each lease."""

    def __init__(
        self, settings: LeaseSettings, events: Events, outcomes: OutcomeCounts, send: Send, ask: Ask
    ) -> None:
        self.settings = settings
        self.table: dict[LeaseName, LeaseEntry] = {}
        self.readers = 0  # of all open leases, known by name
        self._of_engine: dict[str, set[str]] = {}
        self._presented: dict[str, dict[str, PresentedLease]] = {}
        """By engine and request: leases that an owner has presented, and that are not in the table yet."""
        self._held: Tally[str] = Tally()
        self._room = LeaseRoom()
        self._events = events
        self._outcomes = outcomes
        self._send = send
        self._ask = ask
        self._ended = EndedLeases()
        self._expiry: Deadlines[LeaseName] = Deadlines(self._expired)
        self.on_opened: Callable[[LeaseEntry], None] = lambda _lease: None
        self.on_ended: Callable[[LeaseName], None] = lambda _name: None
        self.on_closed: Callable[[LeaseEntry, str], None] = lambda _lease, _end: None

    def open(self, owner: Client, leases: OpenLeases) -> None:
        """The owner opened leases, or says again how long they last. Raises `RequestRefused` for more than may be.

        One that has ended stays so: this was sent before its owner knew, and the blocks are free by now.
        """
        leases, new = self._admitted(owner, leases)
        engine_id = owner.engine.engine_id
        self._outcomes.opened(engine_id, new, time.monotonic())
        for lease in leases:
            self._take_over((engine_id, lease.request_id))
            self._hold(owner, lease)

    def open_held(self, owner: Client, leases: OpenLeases) -> None:
        """The same of leases for which its registration had no room: they count as if they had been listed there."""
        self._present(owner, self._admitted(owner, leases)[0])

    def _admitted(self, owner: Client, leases: OpenLeases) -> tuple[OpenLeases, list[str]]:
        """Those that have not ended, and the ids of the new ones. Raises `RequestRefused` for more than may be."""
        engine_id = owner.engine.engine_id
        leases = tuple(lease for lease in leases if not self._has_ended(owner, lease))
        new = [lease.request_id for lease in leases if (engine_id, lease.request_id) not in self.table]
        if new and (full := self._room.full(owner.uid, new)):
            raise RequestRefused(
                "KVD-TOO-MANY",
                f"{owner.name} opens {len(new)} leases: {full}",
                hint="the router may send more prompts to prefill than decoders take: see `kvctl doctor`",
            )
        return leases, new

    def present(self, owner: Client, leases: OpenLeases, *, complete: bool = True) -> None:
        """The owner registered (again), and lists what it holds.

        Where the list is ``complete``, what ended here while it was away ends there now. Else what is not listed stays
        that of the same incarnation. Of many the rest is taken in the next turns of the loop, and what is asked for
        before that at once. What is not listed is not open from now on, and its place is free in the next turns.
        """
        engine_id = owner.engine.engine_id
        dropped: list[LeaseEntry] = []
        for request_id in self._of_engine.get(engine_id, set()) - {lease.request_id for lease in leases}:
            entry = self.table[engine_id, request_id]
            if not complete and entry.owner.incarnation == owner.incarnation:
                entry.owner = owner
            else:
                entry.dropped = True
                dropped.append(entry)
                self._not_of(engine_id, request_id)
        spread(dropped, self._forget)
        before = self._presented.pop(engine_id, {})
        if not complete:
            same = {n: x for n, x in before.items() if x.owner.incarnation == owner.incarnation}
            self._presented[engine_id] = {n: PresentedLease(owner, x.lease, x.at) for n, x in same.items()}
        self._present(owner, leases)

    def _present(self, owner: Client, leases: OpenLeases) -> None:
        engine_id, at = owner.engine.engine_id, time.monotonic()
        waiting = self._presented.pop(engine_id, {})
        waiting.update((lease.request_id, PresentedLease(owner, lease, at)) for lease in leases)
        if waiting:
            self._presented[engine_id] = waiting
        spread(tuple(waiting), lambda request_id: self._take_over((engine_id, request_id)))

    def _take_over(self, name: LeaseName) -> None:
        """Hold a lease that its owner has presented, if that was not done yet."""
        of_engine = self._presented.get(name[0], {})
        if (presented := of_engine.pop(name[1], None)) is None:
            return
        if not of_engine:
            del self._presented[name[0]]
        if self._has_ended(presented.owner, presented.lease):
            return
        if presented.owner.state != "gone":
            gone_by = time.monotonic() - presented.at
            lease = msgspec.structs.replace(presented.lease, seconds=presented.lease.seconds - gone_by)
            self._hold(presented.owner, lease, inherited=True)

    def _has_ended(self, owner: Client, lease: OpenLease) -> bool:
        """Whether that opening has ended; its owner is told again then."""
        name = (owner.engine.engine_id, lease.request_id)
        if (ended := self._ended.that(name, owner.incarnation, lease.opening)) is None:
            return False
        self._events.counters["leases.openings_late"] += 1
        self._send(owner.route, LeaseEnded(request_id=name[1], end=ended.end, opening=lease.opening))
        return True

    def find(self, name: LeaseName) -> LeaseEntry | None:
        """An open lease; its owner lives."""
        self._take_over(name)
        lease = self.table.get(name)
        return None if lease is None or lease.dropped or lease.owner.state == "gone" else lease

    def _forget(self, dropped: LeaseEntry) -> None:
        """Take a lease out that its owner no longer lists, if that was not done yet."""
        if self.table.get(name := (dropped.owner.engine.engine_id, dropped.request_id)) is dropped:
            self._remove(name)

    def requests_of(self, engine_id: str) -> AbstractSet[str]:
        """The requests of an engine's open leases."""
        return self._of_engine.get(engine_id, set()) | self._presented.get(engine_id, {}).keys()

    def count(self, engine_id: str) -> int:
        """Open leases of an engine."""
        return len(self._of_engine.get(engine_id, ())) + len(self._presented.get(engine_id, ()))

    async def claim(self, claim: LeaseClaim, claimant: Claimant) -> LeaseClaimed:
        """How long the blocks are certain to be kept, after asking the owner for more where that is wanted.

        Raises `RequestRefused` where the claimant has too many readers.
        """
        received = time.monotonic()
        name, reader = (claim.key.engine_id, claim.key.request_id), (claimant.name, claim.reader)
        self._outcomes.claimed(*name)
        lease = self.find(name)
        if lease is None:
            ended = self._ended.get(name)
            why = ended.end if ended else "never opened"
            nothing = f"engine {name[0]!r} holds no lease {name[1]!r}: {why}"
            return claim_of_nothing(name, nothing, ended=ended is not None)
        if refusal := lease.refusal(reader):
            return refusal
        if reader in lease.readers:
            self._events.counters["leases.renewals"] += 1
        else:
            self._let_in(lease, reader)
            lease.claimed = lease.claimed or received
            self._events.counters["leases.claims"] += 1
        # Before anything is waited for: another reader may go meanwhile.
        lease.readers[reader] = until = lease.until(stranger=claimant.stranger)
        reason, wanted = "", self._wanted(lease, claim, claimant, received)
        if wanted > until - received - self.settings.margin_seconds:
            if lease.ending:
                reason = f"{lease.closed}: this is what is left"
            elif claimant.stranger:
                reason = f"the reader's engine was not given the card of {name[0]!r}: nothing is kept longer for it"
            else:
                reason = await self._extend(name, lease, wanted + self.settings.margin_seconds)
        lease = self.find(name)
        if lease is None or reader not in lease.readers:
            return claim_of_nothing(name, reason or "the lease ended meanwhile", ended=True)
        lease.readers[reader] = until = lease.until(stranger=claimant.stranger)
        # What is counted from the claim's sending, which was before `received`, ends before the lease does.
        seconds = max(0.0, until - received - self.settings.margin_seconds)
        return LeaseClaimed(request_id=name[1], seconds=seconds, reason=reason)

    def release(self, release: LeaseRelease, claimant: Claimant) -> None:
        """A reader needs the blocks no longer; with the last one the lease ends. An unknown lease is no error."""
        name, reader = (release.key.engine_id, release.key.request_id), (claimant.name, release.reader)
        self._outcomes.claimed(*name)
        lease = self.find(name)
        if lease is None or reader in lease.gone:
            self._events.counters["leases.releases_repeated"] += 1
            return
        self._events.counters["leases.releases"] += 1
        claimed = lease.readers.pop(reader, None) is not None
        if claimed:
            self.readers -= 1
            lease.gone.add(reader)
        elif not lease.full(claimant.name) and self._held[claimant.name] < MAX_HELD:
            # Its claim was lost on the way: what was sent before may still come.
            self._count(lease, claimant.name)
            lease.gone.add(reader)
        left = lease.promised()
        if claimant.stranger or not (claimed or claimant.knows):
            self._events.counters["leases.releases_of_strangers"] += 1
        elif left <= time.monotonic():
            self._end(name, "aborted" if release.result == "aborted" else "released", release.result)
        elif left < lease.expires:
            self._keep_until(name, lease, left)

    def end(self, lease: LeaseEntry) -> None:
        """An operator ends an open lease: at once without readers, else when they have gone or were promised no more.

        Its blocks may be read until then, and whoever reads what was computed over would not notice.
        """
        lease.ending = True
        if not self.shut(lease, f"an operator ended lease {lease.request_id!r}"):
            self._keep_until((lease.owner.engine.engine_id, lease.request_id), lease, lease.promised())

    def shut(self, lease: LeaseEntry, why: str) -> bool:
        """Let no further reader in. Whether that ended it, as nobody reads under it."""
        name = lease.owner.engine.engine_id, lease.request_id
        if self.find(name) is not lease:
            return True
        lease.closed = why
        if ends := lease.promised() <= time.monotonic():
            self._end(name, "aborted", "operator")
        return ends

    def closed(self, closed: LeaseClosed) -> None:
        """The owner freed the blocks by itself. What it says of an earlier opening ends no later one."""
        name = (closed.engine_id, closed.request_id)
        lease = self.find(name)
        if lease is not None and closed.opening in {0, lease.opening}:
            self._remove(name, closed.end)
            self._emit(closed.end, name, by="owner")

    def owner_gone(self, owner: Client) -> None:
        """The owner died: nobody keeps its blocks, and nobody is let in from now on.

        Of many the rest is ended in the next turns of the loop.
        """
        engine_id = owner.engine.engine_id

        def end(request_id: str) -> None:
            lease = self.table.get(name := (engine_id, request_id))
            if lease is not None and lease.owner.incarnation == owner.incarnation:
                self._remove(name)
                self._emit("owner_gone", name, by="kvd", reason="its scheduler is gone")

        presented = self._presented.pop(engine_id, {})
        if others := {n: one for n, one in presented.items() if one.owner is not owner}:
            self._presented[engine_id] = others
        spread(tuple(self._of_engine.get(engine_id, ())), end)

    def close(self) -> None:
        """Drop all without a word: a kvd that ends does not end leases."""
        for name in list(self.table):
            self._remove(name)
        self._expiry.close()

    def _hold(self, owner: Client, lease: OpenLease, *, inherited: bool = False) -> None:
        name = (owner.engine.engine_id, lease.request_id)
        seconds = min(max(lease.seconds, 0.0), self.settings.max_seconds)
        older, now = self.table.get(name), time.monotonic()
        if older is not None and (older.dropped or older.owner.incarnation != owner.incarnation):
            self._remove(name)  # of one that is gone: its readers are none of this one's
            older = None
        expires = now + seconds
        if older is not None:
            older.owner, older.blocks, older.expires = owner, lease.blocks, expires
            older.opening = lease.opening
            self._expiry.set(name, expires)
            return
        if self._room.full(owner.uid, name[1:]):
            self._events.counters["leases.not_kept"] += 1
            return
        self._room.take(owner.uid, name[1])
        self._ended.discard(name)
        opened = self.table[name] = LeaseEntry(
            owner, name[1], lease.blocks, now, expires, expires, lease.opening, traceparent=lease.traceparent
        )
        self._expiry.set(name, expires)
        self._of_engine.setdefault(name[0], set()).add(name[1])
        if inherited:
            opened.readers[INHERITED] = expires
        self._emit("opened", name, seconds=seconds, blocks=lease.blocks, inherited=inherited)
        self.on_opened(opened)

    def _let_in(self, lease: LeaseEntry, reader: tuple[str, str]) -> None:
        if self._held[reader[0]] >= MAX_HELD:
            raise RequestRefused(
                "KVD-TOO-MANY-READERS",
                f"this host or client reads under {self._held[reader[0]]} claims here, {MAX_HELD} are the most",
                hint="release what was read, then claim again",
            )
        self._count(lease, reader[0])
        self.readers += 1

    def _count(self, lease: LeaseEntry, claimant: str) -> None:
        lease.held[claimant] = lease.held.get(claimant, 0) + 1
        self._held.add(claimant)

    def _wanted(self, lease: LeaseEntry, claim: LeaseClaim, claimant: Claimant, now: float) -> float:
        """For how long from ``now`` the reader may ask."""
        most = self.settings.max_seconds
        if claimant.peer:
            most = min(self.settings.peer_seconds, lease.opened + most - now)
        return min(claim.extend_seconds, most)

    async def _extend(self, name: LeaseName, asked: LeaseEntry, seconds: float) -> str:
        sent = time.monotonic()
        request = LeaseExtend(request_id=name[1], seconds=seconds, opening=asked.opening)
        try:
            answer = await self._ask(asked.owner.route, request, self.settings.confirm_seconds)
        except TimeoutError:
            return f"its scheduler did not confirm within {self.settings.confirm_seconds:g} s; this is what is left"
        if not isinstance(answer, LeaseClaimed):
            said = getattr(answer, "message", answer)
            return f"its scheduler did not confirm: {said}; this is what is left"
        if (lease := self.table.get(name)) is not asked:
            return ""
        if answer.seconds <= 0:
            self._remove(name, "expired")
            return answer.reason or "its scheduler holds the lease no longer"
        self._keep_until(name, lease, sent + min(answer.seconds, self.settings.max_seconds))
        self._emit("extended", name, seconds=answer.seconds)
        return answer.reason

    def _keep_until(self, name: LeaseName, lease: LeaseEntry, expires: float) -> None:
        lease.expires = expires
        self._expiry.set(name, expires)

    def _expired(self, name: LeaseName) -> None:
        if self.table[name].dropped:
            self._remove(name)
        elif self.table[name].ending:
            self._end(name, "aborted", "operator")
        else:
            self._end(name, "expired", "")

    def _end(self, name: LeaseName, end: LeaseEnd, result: str) -> None:
        lease = self._remove(name, end)
        self._send(lease.owner.route, LeaseEnded(request_id=name[1], end=end, opening=lease.opening))
        self._emit(end, name, by="kvd", result=result, readers=len(lease.readers) + len(lease.gone))

    def _emit(self, what: str, name: LeaseName, **detail: Detail) -> None:
        self._events.counters[f"leases.{what}"] += 1
        self._events.emit(f"lease.{what}", name[1], engine=name[0], **detail)

    def _remove(self, name: LeaseName, end: LeaseEnd | None = None) -> LeaseEntry:
        """Take a lease out; ``end``: it has ended for its owner too, whose messages from before that may still come."""
        lease = self.table.pop(name)
        self._expiry.discard(name)
        self.on_ended(name)
        self.on_closed(lease, end or "owner_gone")
        self._room.give_back(lease.owner.uid, name[1])
        self._not_of(*name)
        self.readers -= sum(reader != INHERITED for reader in lease.readers)
        for claimant, count in lease.held.items():
            self._held.add(claimant, -count)
        if end is not None:
            self._ended.add(name, lease.ended(end))
        return lease

    def _not_of(self, engine_id: str, request_id: str) -> None:
        requests = self._of_engine.get(engine_id, set())
        requests.discard(request_id)
        if not requests:
            self._of_engine.pop(engine_id, None)
