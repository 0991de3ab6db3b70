"""The roster: all clients of this host, living and gone; no look-up in it takes longer for many of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

from kvd.service.engines.local_engine import Client, ClientState
from kvd.service.engines.tombstones import Tombstones
from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally, beyond

MOST_CLIENTS_OF_UID = 16_384
"""Most workers and schedulers of one user: 64 engines of 128 workers, each with its scheduler, are half as many."""
MOST_CLIENTS = 32_768
"""Most of all users: one user's leave as many for the others."""
MOST_BYTES_OF_UID = 128 << 20
"""Most bytes of cards and facts of one user's clients: 10,000 workers of 80 layers have 12 KB each."""
MOST_BYTES = 192 << 20
"""Most of all users' clients: with them kvd stays below 300 MB."""
MOST_GONE_OF_UID = 2048
"""Most clients of a user that are remembered for operators once they are gone; those before are forgotten."""


class Roster:
    """All clients: how many there are by kind and state (``workers.alive``), by uid, and the bytes of their cards.

    Those alive are kept in the order in which they were heard of, so who looks for the oldest looks at those alone.
    """

    def __init__(self) -> None:
        self.by_incarnation: dict[str, Client] = {}
        self.counts: Tally[str] = Tally()
        self.living_of: Tally[int] = Tally()
        self.bytes_of: Tally[int] = Tally()
        self._by_route: dict[bytes, Client] = {}
        self._alive: OrderedDict[str, Client] = OrderedDict()
        self._gone = Tombstones(MOST_GONE_OF_UID)

    def check_room(self, client: Client) -> None:
        """Raise `RequestRefused` where its user, or all users together, have as many clients as there may be."""
        bounds = MOST_CLIENTS_OF_UID, MOST_CLIENTS
        self._refuse(client, beyond(self.living_of, "workers and schedulers", client.uid, 1, bounds))

    def check_size(self, client: Client, instead: Client | None) -> None:
        """Raise `RequestRefused` where there is no room for its card, when it comes ``instead`` of another."""
        more = client.size - (instead.size if instead is not None and instead.state != "gone" else 0)
        bounds = MOST_BYTES_OF_UID, MOST_BYTES
        if more > 0:
            self._refuse(client, beyond(self.bytes_of, "bytes of cards", client.uid, more, bounds))

    def _refuse(self, client: Client, full: str) -> None:
        if full:
            raise RequestRefused(
                "KVD-TOO-MANY",
                f"{client.name}, whose card has {client.size} bytes, is not taken: {full}",
                hint="stop some; `kvctl workers` lists them",
            )

    def add(self, client: Client) -> None:
        """A client that lives, in the place of what its incarnation was before."""
        before = self.by_incarnation.get(client.incarnation)
        if before is not None:
            self._take_out(before)
            self._drop_route(before)
        self.by_incarnation[client.incarnation] = client
        self._by_route[client.route] = client
        self._put_in(client)

    def sign_of_life(self, client: Client) -> None:
        """One that is alive was heard of just now."""
        client.last_heard = time.monotonic()
        self._alive.move_to_end(client.incarnation)

    def change(self, client: Client, state: ClientState, reason: str) -> None:
        """It is in another state from now on."""
        self._take_out(client)
        client.state, client.reason, client.since = state, reason, time.time()
        self._put_in(client)

    def unheard(self, since: float) -> Iterator[Client]:
        """Those alive that were last heard of before, oldest first. Each is to be in another state when asked on."""
        while self._alive and (client := next(iter(self._alive.values()))).last_heard < since:
            yield client

    def pardon(self, late: float, now: float) -> None:
        """Nobody could be heard of for so long: that counts for no one."""
        for client in self.by_incarnation.values():
            client.last_heard = min(now, client.last_heard + late)

    def on_route(self, route: bytes) -> Client | None:
        """The client that registered on a route last, also one that is gone."""
        return self._by_route.get(route)

    def forget(self, before: float) -> None:
        """Drop who has been gone since before Unix time ``before``, and of each user who is gone beyond the bound."""
        for incarnation in self._gone.forgotten(before):
            client = self.by_incarnation.pop(incarnation)
            self.counts.add(f"{client.kind}s.gone", -1)
            self._drop_route(client)

    def _put_in(self, client: Client) -> None:
        self.counts.add(f"{client.kind}s.{client.state}")
        if client.state == "gone":
            self._gone.add(client.incarnation, client.uid)
            return
        self.living_of.add(client.uid)
        self.bytes_of.add(client.uid, client.size)
        if client.state == "alive":
            self._alive[client.incarnation] = client

    def _take_out(self, client: Client) -> None:
        self.counts.add(f"{client.kind}s.{client.state}", -1)
        if client.state == "gone":
            self._gone.discard(client.incarnation)
            return
        self._alive.pop(client.incarnation, None)
        self.living_of.add(client.uid, -1)
        self.bytes_of.add(client.uid, -client.size)

    def _drop_route(self, client: Client) -> None:
        if self._by_route.get(client.route) is client:
            del self._by_route[client.route]
