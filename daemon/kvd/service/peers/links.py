"""Links to other kvds, by endpoint."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Hashable
from itertools import islice

from kvd.service.config import PeerSettings
from kvd.service.errors import PeerAway
from kvd.service.peers import troubles
from kvd.service.peers.link import PeerLink
from kvd.service.peers.listener import Listener
from kvd.service.peers.silence import Silences
from kvd.service.peers.troubles import LinkKeys, Trouble
from kvd.service.peers.trust import Keys
from kvd.service.sockets.channel import Channel, ChannelOwner
from kvd.service.sockets.dialling import DialKind, Dialler
from kvd.service.sockets.events import Events
from kvd.service.sockets.fair_lines import ASKER
from kvd.service.sockets.resolver import literal
from kvd.wire.handshake import Ping
from kvd.wire.identity import Endpoint
from kvd.wire.query import PeerRow

MOST_UNTRUSTED = 256
"""Rows of those that are to be linked and not trusted, for operators; a gauge counts all."""
CANDIDATES = 64
"""Links that are looked at for one that gives way."""
QUIET_PINGS_A_SECOND = 16
LONGEST_QUIET_SECONDS = 10.0
"""How often links are pinged that nobody needs now: so many in a second, each after this long at the latest."""
IDLE_SECONDS = 120.0
"""A link that nothing uses is closed after this long."""


class PeerLinks:
    """The links by endpoint; made at first use, closed when nothing needs them.

    ``here`` is where peers are told that this kvd is, ``most`` how many links there may be.
    """

    def __init__(
        self,
        dialler: Dialler,
        settings: PeerSettings,
        keys: Keys | None,
        events: Events,
        me: Ping,
        most: int,
        here: Endpoint,
    ) -> None:
        self.links: dict[Endpoint, PeerLink] = {}
        self.silences = Silences(self._suspect, self._quiet_pause)
        self.listener: Listener
        self.dialler = dialler
        self.most = most
        self._settings = settings
        self._keys = keys
        self._events = events
        self._me = me
        self._unproven: OrderedDict[Endpoint, PeerLink] = OrderedDict()  # and some that were proven since
        self._names: dict[tuple[Hashable, str], asyncio.Task[None]] = {}
        """Names that are looked up, and on whose account."""
        self.kept: set[Endpoint] = set()
        """Endpoints whose links stand whether they are used or not."""
        self.written: frozenset[Endpoint] = frozenset()
        """Those of them that the operator wrote down (``peer.connect``). Only these never give way to others."""
        self._ours = f"'{keys.public.decode()}' {here}" if keys is not None else ""
        self._keys_since = time.time()

    def get(self, endpoint: Endpoint) -> PeerLink:
        """The link to an endpoint. Raises `PeerAway` where none can be made, naming the endpoint.

        Where it has no connection the name is looked up on the account of whoever asks, too: who named it first may
        have many others looked up.
        """
        link = self.links.get(endpoint)
        if link is None:
            key = self._expected(endpoint)
            self._make_room(endpoint)
            secret = self._keys.secret if self._keys is not None else b""

            def dial(owner: ChannelOwner, kind: DialKind) -> Awaitable[Channel]:
                return self.dialler.dial(endpoint, owner, secret, key, kind, kept=endpoint in self.written)

            link = self.links[endpoint] = PeerLink(
                endpoint,
                dial,
                self._settings,
                self._events,
                self.listener,
                self._me,
                LinkKeys(key, self._ours),
                self.silences,
            )
            self._unproven[endpoint] = link
        if not link.connected:
            self._look_up(endpoint)
        return link

    def _quiet_pause(self) -> float:
        """The more links there are, the less often each of those that nobody needs now is pinged."""
        return min(LONGEST_QUIET_SECONDS, len(self.links) / QUIET_PINGS_A_SECOND)

    def _suspect(self, generation: str, since: float) -> bool:
        """Others had no answer of a kvd since then. Whoever is not linked is of no interest."""
        found = [link for link in self.links.values() if link.generation == generation]
        return any(link.suspect(since) for link in found)

    def _look_up(self, endpoint: Endpoint) -> None:
        whose = ASKER.get(), endpoint.host
        if whose not in self._names and not literal(endpoint.host):
            looking = self.dialler.look_up(endpoint.host, kept=endpoint in self.written)
            self._names[whose] = task = asyncio.get_running_loop().create_task(looking)
            task.add_done_callback(lambda _: self._names.pop(whose, None))

    def trusts(self, endpoint: Endpoint) -> bool:
        """Whether a link to it may be made: its host's key is known, or peers have none."""
        return self._keys is None or bool(self._keys.of(endpoint.host, endpoint.port))

    def expected(self, endpoint: Endpoint) -> str | None:
        """The key that its host must show; empty where none is trusted, None where peers have no keys."""
        return None if self._keys is None else self._keys.of(endpoint.host, endpoint.port).decode()

    def up(self, endpoint: Endpoint) -> bool:
        """Whether there is a link to it that works."""
        link = self.links.get(endpoint)
        return link is not None and link.state == "up"

    def leads_here(self, endpoint: Endpoint) -> bool | None:
        """Whether this kvd itself answers there, under another address than others know; None: nobody did so far."""
        link = self.links.get(endpoint)
        if link is None or not link.generation:
            return None
        return link.generation == self._me.kvd_generation

    async def let_go(self, endpoint: Endpoint) -> None:
        """Close a link that was made only because its endpoint was kept, and that nothing uses."""
        link = self.links.get(endpoint)
        if link is not None and endpoint not in self.kept and not self.listener.using(endpoint):
            del self.links[endpoint]
            await link.close()

    def rows(self, untrusted: list[Endpoint]) -> tuple[PeerRow, ...]:
        """All links as operators see them, and some of those that are to be linked and not trusted."""
        return (
            *(link.row() for link in self.links.values()),
            *map(self._untrusted_row, untrusted[:MOST_UNTRUSTED]),
        )

    @property
    def untrusted(self) -> list[Endpoint]:
        """Who is to be linked whether it is used or not, and cannot be, since no key is trusted for it."""
        return [one for one in self.kept if one not in self.links and not self.trusts(one)]

    def missing(self, endpoint: Endpoint) -> Trouble:
        """What is wrong where no key is trusted for a kvd."""
        revoked = self._keys is not None and self._keys.was_revoked(endpoint.host, endpoint.port)
        return troubles.untrusted(endpoint, revoked=revoked)

    async def keys_changed(self) -> None:
        """End the links to hosts whose keys are not trusted any more, or are others now.

        What needs them makes them anew. The engines of a host that has lost its trust are gone, those of one that has
        another key are away.
        """
        if self._keys is None:
            return
        self._keys_since = time.time()
        ended = []
        for endpoint, link in list(self.links.items()):
            expected = self._keys.of(endpoint.host, endpoint.port)
            if link.keys.theirs == expected and expected in self._keys.authorised:
                continue
            reason = (
                "its host has another key now" if expected else "the key of its host is not trusted any more"
            )
            del self.links[endpoint]
            ended.append(link)
            link.end(reason)
            if not expected:
                for engine_id, generation in self.listener.using(endpoint):
                    self.listener.peer_engine_gone(endpoint, engine_id, generation, reason)
        for link in ended:
            await link.close()

    async def prune(self) -> None:
        """Close, every few seconds until cancelled, the links that nothing uses."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            before = time.monotonic() - IDLE_SECONDS
            for endpoint, link in list(self.links.items()):
                idle = link.used < before and endpoint not in self.kept and not self.listener.using(endpoint)
                # While another one closes it may have given way, or been made anew.
                if idle and self.links.get(endpoint) is link:
                    del self.links[endpoint]
                    await link.close()

    async def close(self) -> None:
        """Close all, those too that are made meanwhile."""
        while self.links:
            _, link = self.links.popitem()
            await link.close()
        for task in list(self._names.values()):
            task.cancel()

    def _make_room(self, endpoint: Endpoint) -> None:
        """End a link that never was up, where there are too many. Raises `PeerAway` where there is none.

        What clients name may be anything. So half of the room is for peers that have answered. Of the others one of the
        oldest goes that could not be reached; if all of these are still being tried, the oldest.
        """
        if len(self.links) < self.most and len(self._unproven) < self.most // 2:
            return
        unproven: list[PeerLink] = []
        while self._unproven and not unproven:
            for candidate, link in list(islice(self._unproven.items(), CANDIDATES)):
                if link.kvd_id or candidate in self.written or self.links.get(candidate) is not link:
                    del self._unproven[candidate]
                else:
                    unproven.append(link)
        if len(self.links) >= self.most and not unproven:
            raise PeerAway(
                f"{self.most} other kvds are linked already; none can be added for {endpoint.host}"
            )
        if unproven and (len(self.links) >= self.most or len(self._unproven) >= self.most // 2):
            gone = next((link for link in unproven if link.failed), unproven[0])
            self._events.counters["peers.gave_way"] += 1
            del self.links[gone.endpoint], self._unproven[gone.endpoint]
            gone.end("it never answered, and gave way to others")

    def _expected(self, endpoint: Endpoint) -> bytes:
        """The key of the host of an endpoint. Raises `PeerAway` where none is trusted."""
        if self._keys is None:
            return b""
        if not (key := self._keys.of(endpoint.host, endpoint.port)):
            raise PeerAway(str(self.missing(endpoint)))
        return key

    def _untrusted_row(self, endpoint: Endpoint) -> PeerRow:
        missing = self.missing(endpoint)
        return PeerRow(
            endpoint=endpoint,
            kvd_id="",
            state="untrusted",
            rtt=0.0,
            since=self._keys_since,
            reason=missing.reason,
            hint=missing.hint,
        )
