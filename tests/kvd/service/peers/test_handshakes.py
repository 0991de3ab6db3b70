"""What one kvd fetches of another and for how long it keeps it, on a loop of the test's own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from kvd.service.config import PeerSettings
from kvd.service.engines.local_engine import Client
from kvd.service.engines.registry import Registry
from kvd.service.errors import RequestRefused
from kvd.service.peers import discovery, peer_store
from kvd.service.peers.comparer.messages import Found
from kvd.service.peers.comparer.pool import Whose
from kvd.service.peers.compatibility import CompatibilityCache
from kvd.service.peers.handshakes import Handshakes, Myself
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.peer_engine import PeerEngine
from kvd.service.sockets.events import Events
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, PeerReady
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.names import generation_of
from kvd.wire.query import EngineList, EngineRow, ListEngines
from kvd.wire.reply import RefusalFactor, Refused
from tests.support.daemons import facts, worker

THERE = Endpoint("there", 1)


class OtherKvd:
    """Stands for the links, and for the one kvd that they lead to: it answers after some turns of the loop."""

    def __init__(self, answer: Message, turns: int = 3) -> None:
        self.answer = answer
        self.turns = turns
        self.asked: list[Message] = []
        self.state, self.generation, self.changes, self.engines = "up", "k", 0, 0

    def get(self, _endpoint: Endpoint) -> OtherKvd:
        return self

    def trusts(self, _endpoint: Endpoint) -> bool:
        return True

    def leads_here(self, _endpoint: Endpoint) -> bool:
        return False

    async def ask(self, message: Message, _seconds: float) -> Message:
        self.asked.append(message)
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return self.answer


class Fits:
    """Finds that all engines fit."""

    async def shape(self, _peer: EngineCard) -> Found:
        return Found(shape="shape")

    async def compare(self, _local: EngineCard) -> Found:
        return Found()


@asynccontextmanager
async def whoever_asks(_peer: Whose) -> AsyncIterator[Fits]:
    yield Fits()


def handshakes_with(other: OtherKvd, counters: Counter[str]) -> Handshakes:
    """Those of a kvd with one engine, ``d``, which fits any other."""
    events = Events(None, counters)
    registry = Registry(events, settled=0.0)
    card = worker(facts("d")).card
    registry.register(
        Client("worker", card.engine, card.incarnation, card.pid, b"route", rank=card.rank, card=card)
    )
    myself = Myself("here", "g", "host", Endpoint("here", 1), time.monotonic(), time.time())
    return Handshakes(
        myself, registry, cast("PeerLinks", other), events, lambda *_: None,
        CompatibilityCache(whoever_asks, counters), PeerSettings(),
    )  # fmt: skip


def described(incarnation: str = "one") -> EngineDescribed:
    made = worker(facts("p"), incarnation=incarnation).card
    card = EngineCard(engine=facts("p"), generation=generation_of([incarnation]), workers=(made,))
    return EngineDescribed(card=card, kvd_generation="there", shape="shape")


def ask(**more: Any) -> GetPeer:
    return GetPeer(local_engine="d", engine_id="p", endpoint=THERE, **more)


@pytest.mark.parametrize("turns", range(12))
def test_whoever_asks_while_an_answer_is_handed_out_starts_no_second_flight(turns: int) -> None:
    """The second one asks in some turn of the loop: before, while and after the answer comes."""
    other, counters = OtherKvd(described()), Counter[str]()

    async def run() -> None:
        handshakes = handshakes_with(other, counters)
        first = asyncio.create_task(handshakes.get(ask()))
        for _ in range(turns):
            await asyncio.sleep(0)
        second = asyncio.create_task(handshakes.get(ask()))
        assert all(isinstance(answer, PeerReady) for answer in await asyncio.gather(first, second))

    asyncio.run(run())
    assert (counters["handshakes.flights"], [type(m) for m in other.asked]) == (1, [DescribeEngine])


def test_engines_whose_kvd_stays_away_are_forgotten_so_that_its_link_can_end() -> None:
    async def run() -> None:
        handshakes = handshakes_with(OtherKvd(described()), Counter())
        await handshakes.get(ask())
        handshakes.link_down(THERE, "no answer")
        handshakes.forget(time.time() - 60)
        assert [e for e, _ in handshakes.using(THERE)] == ["p"], "it was away for a moment only"
        handshakes.forget(time.time() + 60)
        assert (handshakes.using(THERE), [*handshakes.peers]) == ((), [])

    asyncio.run(run())


def test_an_engine_whose_kvd_answers_is_not_forgotten() -> None:
    async def run() -> None:
        handshakes = handshakes_with(OtherKvd(described()), Counter())
        await handshakes.get(ask())
        handshakes.forget(time.time() + 60)
        assert handshakes.using(THERE) == (("p", generation_of(["one"])),)

    asyncio.run(run())


def test_a_refusal_of_the_other_kvd_is_passed_on_whole() -> None:
    factors = (RefusalFactor("tp", "1", "3", ok=False),)
    other = OtherKvd(Refused(code="KVD-X", message="no", hint="do this", factors=factors, final=True))

    async def run() -> None:
        with pytest.raises(RequestRefused) as error:
            await handshakes_with(other, Counter()).get(ask())
        assert error.value.refused == Refused(
            code="KVD-X", message="the kvd at there:1: no", hint="do this", factors=factors, final=True
        )

    asyncio.run(run())


def test_a_card_that_finds_no_room_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "MOST_BYTES_OF_ONE", 2000)

    async def run() -> None:
        made = handshakes_with(OtherKvd(Refused(code="KVD-ENGINE-UNKNOWN", message="none")), Counter())
        used, unused = (THERE, "p"), (THERE, "q")
        for key in (used, unused):
            made.peers.put(key, PeerEngine(EngineCard(engine=facts(key[1]), generation="g", workers=())))
        made.peers.at(THERE)["p"].users["d"] = "g"
        larger = EngineCard(engine=facts("p", model="m" * 3000), generation="h", workers=())
        with pytest.raises(RequestRefused, match="one more of"):
            made._keep(used, larger)
        assert list(made.peers) == [used, unused]
        assert made.peers.at(THERE)["p"].state == "ready"

    asyncio.run(run())


class Listing(OtherKvd):
    """A kvd with engine ``p``, which counts how often it is asked for its engines."""

    def __init__(self) -> None:
        card = worker(facts("p")).card
        self.peer = EngineCard(
            engine=card.engine, generation=generation_of([card.incarnation]), workers=(card,)
        )
        super().__init__(EngineDescribed(card=self.peer, kvd_generation="k"))
        self.looks = 0

    async def ask(self, message: Message, seconds: float) -> Message:
        if not isinstance(message, ListEngines):
            return await super().ask(message, seconds)
        self.looks += 1
        row = EngineRow(
            engine=self.peer.engine, generation=self.peer.generation, local=True, state="ready", ranks=(),
            since=0.0, scheduler=True,
        )  # fmt: skip
        return EngineList(rows=(row,))


def discovered(other: Listing, play: Callable[[Handshakes, list[GetPeer]], Awaitable[None]]) -> None:
    """While another kvd is looked at something is done with the handshakes, and with what was asked for."""

    async def run() -> None:
        made = handshakes_with(other, Counter())
        asked: list[GetPeer] = []
        introduce = made.introduce

        async def counted(ask: GetPeer) -> None:
            asked.append(ask)
            await introduce(ask)

        made.introduce = counted  # type: ignore[method-assign]
        looking = asyncio.create_task(
            discovery.discover(THERE, cast("PeerLinks", other), made, made._registry)
        )
        async with asyncio.timeout(10):
            await play(made, asked)
        assert looking.cancel()

    asyncio.run(run())


def brought_up(made: Handshakes) -> None:
    """The local engine has its scheduler."""
    engine = made._registry.engines["d"]
    engine.take(Client("scheduler", facts("d"), "chief", 1, b"chief", policy="recompute"))
    made.local_engine_up(engine)


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 - a look announces nothing
        await asyncio.sleep(0)


def test_discovery_hands_over_a_peer_once_and_asks_a_kvd_of_an_earlier_version_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "LOOK_SECONDS", 0.0)
    other = Listing()

    async def play(made: Handshakes, asked: list[GetPeer]) -> None:
        brought_up(made)
        await until(lambda: other.looks >= 5)
        assert [ask.engine_id for ask in asked] == ["p"]
        assert made.users(THERE, "p", other.peer.generation) == {"d": made._registry.engines["d"].generation}

    discovered(other, play)


def test_a_kvd_that_tells_of_changes_is_asked_when_there_is_one_and_not_for_engines_that_come_up_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "SETTLED_LOOKS", 1000)
    monkeypatch.setattr(discovery, "LOOK_SECONDS", 60.0)
    other = Listing()
    other.changes, other.engines = 2, 1

    async def play(made: Handshakes, asked: list[GetPeer]) -> None:
        await until(lambda: other.looks == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asked
        brought_up(made)
        await until(lambda: bool(made.users(THERE, "p", other.peer.generation)))
        assert other.looks == 1, "what it has was known"
        other.changes = 3
        made.engines_changed(THERE)
        await until(lambda: other.looks == 2)
        assert len(asked) == 1

    discovered(other, play)


def test_a_kvd_without_engines_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_SECONDS", 60.0)
    other = Listing()
    other.changes = 1

    async def play(made: Handshakes, _asked: list[GetPeer]) -> None:
        brought_up(made)
        for _ in range(50):
            await asyncio.sleep(0)
        assert other.looks == 0
        other.changes, other.engines = 2, 1
        made.engines_changed(THERE)
        await until(lambda: bool(made.users(THERE, "p", other.peer.generation)))

    discovered(other, play)


def test_params_that_name_no_address_of_a_kvd_are_refused_with_what_they_name() -> None:
    async def run() -> RequestRefused:
        with pytest.raises(RequestRefused) as refused:
            await handshakes_with(OtherKvd(described()), Counter()).get(
                GetPeer(local_engine="d", engine_id="p", endpoint=Endpoint("there", 70_000))
            )
        return refused.value

    refused = asyncio.run(run())
    assert (refused.code, "'there' port 70000 is no address" in refused.message) == ("KVD-PEER-ADDRESS", True)
