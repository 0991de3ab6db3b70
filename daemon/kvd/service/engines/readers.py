"""Which leases the local engines read under, so that a reader that dies is released by its kvd.

A decoder releases what it claimed. One that dies cannot, and the prefiller would keep the blocks for their whole time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.wire.frame import kind_of
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.wire.registration import OpenReader

log = logging.getLogger(__name__)

MAX_REMEMBERED = 65_536
"""Most readers that are remembered; of those beyond, the ones that claimed longest ago are left to their time."""
RELEASE_AGAIN = (0.1, 2.0)
"""First and longest pause before a release that could not be delivered is sent again, in seconds."""

Release = Callable[[LeaseRelease, str], Awaitable[object]]
"""Sends a release for the client of an incarnation."""


@dataclass(slots=True)
class Reader:
    """A local client's claim on a lease; after ``until`` (time.monotonic()) it has ended by itself."""

    incarnation: str
    reader: str
    key: LeaseKey
    until: float


class Readers:
    """The readers of local engines, by id. Methods are for the event loop."""

    def __init__(self, release: Release, counters: Counter[str]) -> None:
        self.remembered: OrderedDict[str, Reader] = OrderedDict()
        self._release = release
        self._counters = counters
        self._tasks: set[asyncio.Task[None]] = set()

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
        self._remember(Reader(client.incarnation, claim.reader, claim.key, time.monotonic() + most))

    def may_release(self, client: Client, release: LeaseRelease) -> None:
        """Raise `RequestRefused` where the reader is another client's: to other hosts all clients here are one."""
        self._refuse_others(client, release)

    def promised(self, reader: str, seconds: float) -> None:
        """The claim was answered: for so long the blocks are kept."""
        if (one := self.remembered.get(reader)) and seconds > 0:
            one.until = time.monotonic() + seconds

    def presents(self, client: Client, readers: Iterable[OpenReader]) -> None:
        """A client registered (again), and says which claims it has open. What is another client's stays that one's."""
        now = time.monotonic()
        for one in readers:
            known = self.remembered.get(one.reader)
            if known is None or known.incarnation == client.incarnation:
                self._remember(Reader(client.incarnation, one.reader, one.key, now + one.seconds))

    def released(self, reader: str) -> None:
        """Its release was delivered."""
        self.remembered.pop(reader, None)

    def client_gone(self, client: Client) -> None:
        """Release what a client that has ended had claimed.

        One that is only silent may still read, and its blocks must not be given away: those leases end by their time.
        """
        mine = [one for one in self.remembered.values() if one.incarnation == client.incarnation]
        for one in mine:
            del self.remembered[one.reader]
        if not client.ended:
            return
        by_endpoint: dict[Endpoint, list[Reader]] = {}
        for one in sorted(mine, key=lambda one: one.until):
            by_endpoint.setdefault(one.key.endpoint, []).append(one)
        for readers in by_endpoint.values():
            task = asyncio.get_running_loop().create_task(self._release_all(readers, client.name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop sending: what was not delivered ends by its time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _refuse_others(self, client: Client, message: LeaseClaim | LeaseRelease) -> None:
        one = self.remembered.get(message.reader)
        if one is not None and one.incarnation != client.incarnation:
            raise RequestRefused(
                "KVD-NOT-OWNER",
                f"{client.name} sends a {kind_of(message)} for a reader of lease {message.key.request_id!r} that"
                " another client here has",
                hint="a claim is renewed and released by who made it",
                final=True,
            )

    def _remember(self, reader: Reader) -> None:
        now = time.monotonic()
        self.remembered[reader.reader] = reader
        self.remembered.move_to_end(reader.reader)
        while self.remembered and (
            len(self.remembered) > MAX_REMEMBERED or next(iter(self.remembered.values())).until < now
        ):
            self.remembered.popitem(last=False)

    async def _release_all(self, readers: list[Reader], who: str) -> None:
        for one in readers:
            release = LeaseRelease(key=one.key, reader=one.reader, result="aborted")
            pause = RELEASE_AGAIN[0]
            while time.monotonic() < one.until:
                try:
                    await self._release(release, one.incarnation)
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
