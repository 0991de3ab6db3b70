"""Which leases the local engines read under, so that a reader that dies is released by its kvd.

A decoder releases what it claimed. One that dies cannot, and the prefiller would keep the blocks for their whole time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.engines.lease_room import MAX_OPEN, MAX_OPEN_OF_UID
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally
from kvd.service.slices import spread
from kvd.wire.card_parts import text_bytes
from kvd.wire.frame import kind_of
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.wire.registration import OpenReader

log = logging.getLogger(__name__)

MAX_OF_UID = MAX_OPEN_OF_UID
"""Most readers of one user's engines that are remembered; beyond, those that claimed first are left to their time."""
MAX_REMEMBERED = MAX_OPEN
"""Most of all users; beyond, whoever has most loses those that claimed first. As many as leases that are kept here."""
MOST_BYTES_OF_UID = 32 << 20
"""Most bytes that the names in one user's claims take in memory: 512 for each, where real ones take some 300."""
MOST_BYTES = 48 << 20
"""Of all users' together; beyond both the same is done as beyond the numbers."""
RELEASE_AGAIN = (0.1, 2.0)
"""First and longest pause before a release that could not be delivered is sent again, in seconds."""

Release = Callable[[LeaseRelease, Client], Awaitable[object]]
"""Sends a release for a client."""


@dataclass(slots=True)
class Reader:
    """A local client's claim on a lease, made at ``since``; after ``until`` it has ended by itself.

    Both are time.monotonic(). Of a claim that a kvd before this one saw made, ``since`` is when it was presented here.
    """

    client: Client
    reader: str
    key: LeaseKey
    until: float
    since: float = field(default_factory=time.monotonic)
    size: int = 0
    """What its names take in memory."""

    def __post_init__(self) -> None:
        """``size`` follows from the others."""
        key = self.key
        self.size = text_bytes((self.reader, key.engine_id, key.request_id, key.endpoint.host))


class Readers:
    """The readers of local engines, by id. Methods are for the event loop."""

    def __init__(self, release: Release, counters: Counter[str]) -> None:
        self.remembered: dict[str, Reader] = {}
        self._of_client: dict[str, dict[str, None]] = {}
        """Ids by the incarnation of their client, in the order of their claims."""
        self._of_user: dict[int, OrderedDict[str, None]] = {}
        """Ids by user; what was claimed or renewed last is at the end."""
        self._bytes: Tally[int] = Tally()
        self._release = release
        self._counters = counters
        self._tasks = BackgroundTasks()

    def claims(self, client: Client, claim: LeaseClaim, most: float) -> None:
        """A client claims a lease. What is not answered counts for ``most`` seconds.

        Raises `RequestRefused` for a client that has ended, and for a reader of another's.
        """
        self._refuse_others(client, claim)
        if client.ended:
            raise RequestRefused(
                "KVD-NOT-REGISTERED",
                f"{client.name} claims lease {claim.key.request_id!r}, and it has ended: {client.reason}",
                hint="start the engine again",
            )
        self._remember(Reader(client, claim.reader, claim.key, time.monotonic() + most))

    def may_release(self, client: Client, release: LeaseRelease) -> None:
        """Raise `RequestRefused` where the reader is another client's: to other hosts all clients here are one."""
        self._refuse_others(client, release)

    def promised(self, reader: str, seconds: float) -> None:
        """The claim was answered: for so long the blocks are kept."""
        if (one := self.remembered.get(reader)) and seconds > 0:
            one.until = time.monotonic() + seconds

    def presents(self, client: Client, readers: Iterable[OpenReader]) -> None:
        """A client registered (again), and says which claims it has open. What is another client's stays that one's.

        Of many the rest is remembered in the next turns of the loop; where the client has ended by then, released.
        """
        now = time.monotonic()

        def take(one: OpenReader | None) -> None:
            if one is None:
                if client.state == "gone":
                    self.client_gone(client)
                return
            known = self.remembered.get(one.reader)
            if known is None or known.client.incarnation == client.incarnation:
                self._remember(Reader(client, one.reader, one.key, now + one.seconds))

        spread((*readers, None), take)

    def released(self, reader: str) -> None:
        """Its release was delivered."""
        self._forget(reader)

    def client_gone(self, client: Client) -> None:
        """Release what a client that has ended had claimed.

        One that is only silent may still read, and its blocks must not be given away: those leases end by their time.
        Of many the rest is looked at in the next turns of the loop.
        """
        mine: list[Reader] = []

        def take(one: Reader | None) -> None:
            if one is None:
                if client.ended:
                    self._release_of(client, mine)
            elif self.remembered.get(one.reader) is one:  # and not presented anew meanwhile
                self._forget(one.reader)
                mine.append(one)

        known = [self.remembered[reader] for reader in self._of_client.get(client.incarnation, ())]
        spread((*known, None), take)

    def _release_of(self, client: Client, mine: list[Reader]) -> None:
        by_endpoint: dict[Endpoint, list[Reader]] = {}
        for one in sorted(mine, key=lambda one: one.until):
            by_endpoint.setdefault(one.key.endpoint, []).append(one)
        for readers in by_endpoint.values():
            self._tasks.begin(self._release_all(readers, client.name))

    async def close(self) -> None:
        """Stop sending: what was not delivered ends by its time."""
        await self._tasks.close()

    def _refuse_others(self, client: Client, message: LeaseClaim | LeaseRelease) -> None:
        one = self.remembered.get(message.reader)
        if one is not None and one.client.incarnation != client.incarnation:
            raise RequestRefused(
                "KVD-NOT-OWNER",
                f"{client.name} sends a {kind_of(message)} for a reader of lease {message.key.request_id!r} that"
                " another client here has",
                hint="a claim is renewed and released by who made it",
                final=True,
            )

    def _remember(self, reader: Reader) -> None:
        client, now = reader.client, time.monotonic()
        if (known := self.remembered.get(reader.reader)) is not None:
            reader.since = known.since
        self._forget(reader.reader)
        self.remembered[reader.reader] = reader
        self._of_client.setdefault(client.incarnation, {})[reader.reader] = None
        mine = self._of_user.setdefault(client.uid, OrderedDict())
        mine[reader.reader] = None
        self._bytes.add(client.uid, reader.size)
        while mine and (self._beyond(client.uid) or self.remembered[next(iter(mine))].until < now):
            self._forget(next(iter(mine)))
        while len(self.remembered) > MAX_REMEMBERED:
            most = max(self._of_user, key=lambda uid: len(self._of_user[uid]))
            self._forget(next(iter(self._of_user[most])))
        while self._bytes.total > MOST_BYTES:
            most = max(self._of_user, key=self._bytes.__getitem__)
            self._forget(next(iter(self._of_user[most])))

    def _beyond(self, uid: int) -> bool:
        return len(self._of_user[uid]) > MAX_OF_UID or self._bytes[uid] > MOST_BYTES_OF_UID

    def _forget(self, reader: str) -> None:
        if (one := self.remembered.pop(reader, None)) is None:
            return
        client = one.client
        of_client, of_user = self._of_client[client.incarnation], self._of_user[client.uid]
        of_client.pop(reader, None)
        of_user.pop(reader, None)
        self._bytes.add(client.uid, -one.size)
        if not of_client:
            del self._of_client[client.incarnation]
        if not of_user:
            del self._of_user[client.uid]

    async def _release_all(self, readers: list[Reader], who: str) -> None:
        for one in readers:
            release = LeaseRelease(key=one.key, reader=one.reader, result="aborted")
            pause = RELEASE_AGAIN[0]
            while time.monotonic() < one.until:
                try:
                    await self._release(release, one.client)
                except RequestRefused as error:
                    if error.final:
                        break
                    log.info("release for %s, which is gone: %s", who, error.refused.message)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RELEASE_AGAIN[1])
                else:
                    self._counters["readers.released_for_dead"] += 1
                    break
            else:
                self._counters["readers.left_to_their_time"] += 1
