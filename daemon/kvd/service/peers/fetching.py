"""Fetching cards from other kvds: one flight for all who ask, part by part, and bounds on what is under way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from kvd.service.config import PeerSettings
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.fairness.budget import ALL, Budget, FairShare
from kvd.service.fairness.tally import Tally
from kvd.service.peers.card_check import check_card
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.peer_engine import PeerEngine, PeerEngineKey
from kvd.service.slices import Slices
from kvd.service.sockets.events import Events
from kvd.service.sockets.fair_lines import ASKER
from kvd.wire.card_parts import Gathering, with_facts_in_common, with_workers
from kvd.wire.errors import BadCard
from kvd.wire.frame import kind_of
from kvd.wire.handshake import DescribeEngine, EngineDescribed
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.reply import Refused

MOST_FLIGHTS = 4096
"""Most cards that are fetched at a time; a thousand handshakes a second of which each takes four seconds."""
MOST_FLIGHTS_OF_ONE = 256
"""Most of them from one kvd: a host has some tens of engines, each may be asked for with and without its key."""

UNDERWAY_BYTES = 64 << 20
"""Most that parts of cards take which are not whole yet. A card of one part is never among them. Parts of 4,096 workers
of 80 layers have 8 MB, and 40 MB where each layer is a region of its own."""
UNDERWAY_BYTES_OF_ONE = 48 << 20
"""Of that for the questions of one user, and for the cards of one kvd."""

SMALL_CARD = 1 << 20
"""A card of one part and no more bytes is put together at once, and never under way."""

MOST_HANDSHAKES = 12
"""So many times ``peer.handshake_seconds`` all parts of a card may take together. Each may take that once."""
AGAIN_SECONDS = 0.1
"""Pause after a connection was lost between two parts."""

FlightKey = tuple[PeerEngineKey, str, bool]


class Flights:
    """Cards on their way here."""

    def __init__(
        self,
        question: DescribeEngine,
        links: PeerLinks,
        events: Events,
        settings: PeerSettings,
        keep: Callable[[PeerEngineKey, EngineCard], PeerEngine],
    ) -> None:
        """``question`` says who asks; ``keep`` takes each card, before its flight ends."""
        self._question = question
        self._links = links
        self._events = events
        self._settings = settings
        self._keep = keep
        self._flights: dict[FlightKey, asyncio.Task[PeerEngine]] = {}
        self._of: Tally[Endpoint] = Tally()
        self._in_flight = Budget("parts of cards", "bytes")
        self._slices = Slices()

    async def fetch(self, key: PeerEngineKey, generation: str, *, keyed: bool) -> PeerEngine:
        """The engine's card, fetched once for all who ask for it now. Raises `RequestRefused`."""
        which = key, generation, keyed
        flight = self._flights.get(which)
        if flight is None:
            self._refuse_more(key)
            self._events.counters["handshakes.flights"] += 1
            flight = asyncio.get_running_loop().create_task(self._fetch(key, keyed=keyed))
            self._flights[which] = flight
            self._of.add(key[0])
            flight.add_done_callback(lambda done: self._landed(which, done))
        else:
            with contextlib.suppress(PeerAway):
                self._links.get(key[0])  # its name is to be looked up on each one's account
        try:
            # Shielded: one caller that is given up must not end the flight of the others.
            return await asyncio.shield(flight)
        finally:
            del flight  # its error has this frame: a circle

    def _refuse_more(self, key: PeerEngineKey) -> None:
        if self._of[key[0]] >= MOST_FLIGHTS_OF_ONE or len(self._flights) >= MOST_FLIGHTS:
            raise RequestRefused(
                "KVD-BUSY",
                f"{self._of[key[0]]} engines of the kvd at {key[0]} are being fetched, and {len(self._flights)} in all;"
                f" at most {MOST_FLIGHTS_OF_ONE} and {MOST_FLIGHTS} are at a time",
                hint="try again",
            )

    def _landed(self, flight: FlightKey, done: asyncio.Task[PeerEngine]) -> None:
        del self._flights[flight]
        self._of.add(flight[0][0], -1)
        if not done.cancelled():
            done.exception()  # looked at here, since everyone who waited may have left

    async def _fetch(self, key: PeerEngineKey, *, keyed: bool) -> PeerEngine:
        endpoint, engine_id = key
        try:
            card = await self._card(key, keyed=keyed)
            check_card(card, engine_id, f"the kvd at {endpoint}")
            card = with_facts_in_common(card)
            # Kept before the flight ends: between the two nobody may find neither, and fetch it again.
            return self._keep(key, card)
        except PeerAway as away:
            self._events.emit("handshake.failed", engine_id, reason=away.message)
            raise RequestRefused(
                "KVD-PEER-UNREACHABLE",
                f"engine {engine_id!r}: {away.message}",
                hint="check that kvd runs there, its peer.listen and peer.advertise, and the firewall between",
            ) from None
        except RequestRefused as refusal:
            self._events.emit("handshake.failed", engine_id, reason=refusal.message)
            raise

    async def _card(self, key: PeerEngineKey, *, keyed: bool) -> EngineCard:
        """The whole card. A kvd that makes no parts answers with all of it at once.

        Where many ask at a time for the card of a large engine each part takes long: as long as parts come, more come.
        """
        deadline = time.monotonic() + self._settings.handshake_seconds
        last = deadline + (MOST_HANDSHAKES - 1) * self._settings.handshake_seconds
        parts, generation, held = Gathering(), "", list[int]()
        shares = _shares(key[0])
        try:
            while True:
                question = msgspec.structs.replace(
                    self._question, engine_id=key[1], keyed=keyed, first=parts.count, generation=generation
                )
                described = await self._described(key, question, deadline)
                if described is None:  # the rest comes over the next connection
                    await asyncio.sleep(AGAIN_SECONDS)
                    continue
                if described.part is None:
                    return described.card
                before, card = parts.kept, described.card
                whole = _take(parts, described, generation, key)
                if whole and parts.bytes <= SMALL_CARD:
                    return with_workers(card, parts.workers)
                more = parts.kept - before
                if full := self._in_flight.full(shares, more):
                    raise RequestRefused(
                        "KVD-BUSY", f"engine {key[1]!r} of the kvd at {key[0]}: {full}", hint="try again"
                    )
                self._in_flight.take(shares, more)
                held.append(more)
                if whole:
                    workers = await self._slices.collect(parts.taken_apart())
                    return with_workers(card, workers)
                generation = card.generation
                del (
                    described,
                    card,
                )  # a part may come with facts of its own, and the next one may be long in coming
                deadline = min(time.monotonic() + self._settings.handshake_seconds, last)
                await asyncio.sleep(0)  # a part a turn
        finally:
            for size in held:
                self._in_flight.give_back(shares, size)

    async def _described(
        self, key: PeerEngineKey, question: DescribeEngine, deadline: float
    ) -> EngineDescribed | None:
        """The card or a part of it; None where the connection was lost between two parts, and there is time left.

        Raises `RequestRefused` and `PeerAway`.
        """
        endpoint, where = key[0], f"the kvd at {key[0]}"
        try:
            answer = await self._links.get(endpoint).ask(question, max(0.0, deadline - time.monotonic()))
        except PeerAway:
            if not question.first or time.monotonic() + AGAIN_SECONDS > deadline:
                raise
            return None
        if isinstance(answer, Refused):
            raise RequestRefused.passed_on(answer, where)
        if not isinstance(answer, EngineDescribed):
            raise RequestRefused("KVD-PEER-PROTOCOL", f"{where} answered {kind_of(answer)}")
        return answer


def _take(parts: Gathering, described: EngineDescribed, generation: str, key: PeerEngineKey) -> bool:
    """Take a part of a card of that ``generation``, or its first; whether it was the last. Raises `RequestRefused`."""
    endpoint, engine_id = key
    if described.card.generation != (generation or described.card.generation):
        raise RequestRefused(
            "KVD-PEER-GENERATION",
            f"engine {engine_id!r} restarted while it was fetched: it was generation {generation}, and"
            f" is {described.card.generation}",
            hint="ask again",
        )
    try:
        return described.part is not None and parts.add(described.card.engine, described.part)
    except BadCard as error:
        raise RequestRefused(
            "KVD-PEER-CARD", f"the kvd at {endpoint}: engine {engine_id!r}: {error.message}"
        ) from None


def _shares(endpoint: Endpoint) -> tuple[FairShare, ...]:
    """Where parts count: with the kvd that gives them, with the one who caused the question, with all."""
    asker = ASKER.get()
    return (
        FairShare(("from", endpoint), f"of the kvd at {endpoint}", size=UNDERWAY_BYTES_OF_ONE),
        FairShare(("for", asker), "for one user or host", size=UNDERWAY_BYTES_OF_ONE),
        FairShare(ALL, "in all", size=UNDERWAY_BYTES),
    )
