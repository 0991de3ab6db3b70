"""Cards of large engines, part by part: as long as parts come in time the card comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from kvd.service.config import PeerSettings
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.peers import fetching
from kvd.service.peers.fetching import Flights
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.peer_engine import PeerEngine
from kvd.service.sockets.events import Events
from kvd.wire.card_parts import part_from, with_workers
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.names import generation_of
from tests.support.daemons import facts, worker

THERE = Endpoint("there", 1)
FACTS = facts("p", tp=8)
WORKERS = tuple(worker(FACTS, rank).card for rank in range(8))
CARD = EngineCard(
    engine=FACTS,
    generation=generation_of(one.incarnation for one in WORKERS),
    workers=WORKERS,
)
SECONDS = 0.4
"""What a handshake may take here."""

Answer = Callable[[DescribeEngine, int], Awaitable[None]]


class Giver:
    """Stands for the links, and for the kvd that has the card and gives a worker at a time, after ``before``."""

    def __init__(self, before: Answer) -> None:
        self.firsts: list[int] = []
        self._before = before

    def get(self, _endpoint: Endpoint) -> Giver:
        return self

    async def ask(self, message: Message, seconds: float) -> Message:
        assert isinstance(message, DescribeEngine)
        assert message.first is not None
        self.firsts.append(message.first)
        try:
            async with asyncio.timeout(seconds):
                await self._before(message, len(self.firsts))
        except TimeoutError:
            raise PeerAway(f"no answer within {seconds:g} s") from None
        part = part_from(CARD, message.first, 1)
        return EngineDescribed(card=with_workers(CARD, ()), kvd_generation="k", shape="", part=part)


def fetched(giver: Giver) -> EngineCard:
    """The card, as it is fetched."""

    async def run() -> EngineCard:
        flights = Flights(
            DescribeEngine(kvd_id="k", kvd_generation="g", engine_id=""),
            cast("PeerLinks", giver),
            Events(None, Counter()),
            PeerSettings(handshake_seconds=SECONDS),
            lambda _, card: PeerEngine(card),
        )
        return (await flights.fetch((THERE, "p"), "", keyed=False)).card

    return asyncio.run(run())


def test_each_part_may_take_as_long_as_a_handshake() -> None:
    """50 hosts that asked for one large engine made progress alike, and all ran out of time."""

    async def slow(_question: DescribeEngine, _asked: int) -> None:
        await asyncio.sleep(SECONDS / 4)

    giver = Giver(slow)
    assert fetched(giver) == CARD
    assert giver.firsts == list(range(8))


def test_a_card_goes_on_where_the_connection_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "AGAIN_SECONDS", 0.01)

    async def lost(_question: DescribeEngine, asked: int) -> None:
        if asked in (4, 5):
            raise PeerAway("the connection was lost")

    giver = Giver(lost)
    assert fetched(giver) == CARD
    assert giver.firsts == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7]


def test_a_kvd_that_stops_giving_is_given_up() -> None:
    async def stops(_question: DescribeEngine, asked: int) -> None:
        if asked > 3:
            await asyncio.Event().wait()

    giver = Giver(stops)
    with pytest.raises(RequestRefused, match="no answer within"):
        fetched(giver)
    assert giver.firsts == [0, 1, 2, 3]


def test_one_that_gives_little_by_little_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MOST_HANDSHAKES", 2)

    async def slow(_question: DescribeEngine, _asked: int) -> None:
        await asyncio.sleep(SECONDS * 0.75)

    with pytest.raises(RequestRefused, match="no answer within"):
        fetched(Giver(slow))
