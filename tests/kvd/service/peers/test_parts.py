"""Parts of an engine in any order, with losses and returns on the way: its home ends where one host would have been."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from kvd.geometry.alike import DocumentChecker
from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.engines.registry import Registry, Unwatched
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.handlers import parts
from kvd.service.peers import homes
from kvd.service.peers import homes as homes_module
from kvd.service.peers.homes import Homes
from kvd.service.peers.links import PeerLinks
from kvd.service.sockets.events import Events
from kvd.service.sockets.router import Caller
from kvd.wire.frame import Message, decode, encode
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.names import generation_of
from kvd.wire.part import JoinWorker, PartAlive, PartWorker
from tests.support.daemons import facts, worker

HOME, THERE = Endpoint("home", 1), Endpoint("there", 1)
ENGINE = facts("e", tp=4)
TURNS = 400


class Wire:
    """Stands for the link to the home: it loses questions, or their answers, while it is bad."""

    def __init__(self, home: Daemon, dice: random.Random) -> None:
        self.home, self.dice, self.bad = home, dice, False

    def get(self, _endpoint: Endpoint) -> Wire:
        return self

    async def ask(self, message: Message, _seconds: float) -> Message:
        await asyncio.sleep(0)
        lost = self.dice.choice(("question", "answer", "")) if self.bad else ""
        if lost == "question":
            raise PeerAway("lost on the way there")
        message, _ = decode(encode(message))
        assert isinstance(message, JoinWorker | PartAlive)
        try:
            answer: Message = (
                parts.join_worker(self.home, Caller(b"route"), message)
                if isinstance(message, JoinWorker)
                else parts.part_alive(self.home, Caller(b"route"), message)
            )
        except RequestRefused as refusal:
            answer = refusal.refused
        if lost == "answer":
            raise PeerAway("lost on the way back")
        return answer


class Leaving(Unwatched):
    """Tells the homes of clients that have gone."""

    homes: Homes

    def client_gone(self, client: Client) -> None:
        """One is no more."""
        self.homes.client_gone(client)


def kvd() -> Daemon:
    """So much of a kvd as these messages touch."""
    made = SimpleNamespace(
        registry=Registry(Events(None, Counter()), settled=0.0),
        liveness=SimpleNamespace(watch=lambda _client: None),
        geometries=DocumentChecker(),
        keys=None,
    )
    return cast("Daemon", made)


class Hosts:
    """Ranks 0 and 1 at the home, 2 and 3 at the other kvd, and ``living``, by rank: the incarnation of each."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.home = kvd()
        self.living: dict[int, str] = {}
        self.wire = Wire(self.home, dice)
        self.restart_there()

    def restart_there(self) -> None:
        """The other kvd is another process now, and knows nobody."""
        self.there = Registry(Events(None, Counter()), settled=0.0)
        self.homes = Homes(
            THERE, self.there, cast("PeerLinks", self.wire), Events(None, Counter()), self.described
        )
        watcher = Leaving()
        watcher.homes = self.homes
        self.there.watcher = watcher

    async def described(self, _engine_id: str, _home: Endpoint, _generation: str) -> None:
        """Nobody asks for the card."""

    def register(self, rank: int) -> None:
        """The worker of a rank registers, perhaps again."""
        card = worker(ENGINE, rank, self.living[rank], pid=100 + rank).card
        here = rank < 2
        client = Client(
            "worker", ENGINE, card.incarnation, card.pid, card.incarnation.encode(), rank=card.rank, card=card,
            shape="s", home=HERE if here else HOME,
        )  # fmt: skip
        (self.home.registry if here else self.there).register(client)
        if not here:
            self.homes.registered(client, HOME)

    def begin(self, rank: int) -> None:
        """A process begins, in the place of another one if there is one."""
        self.end(rank)
        self.living[rank] = f"{self.dice.getrandbits(64):016x}"
        self.register(rank)

    def end(self, rank: int) -> None:
        """A process ends, and its kvd sees it."""
        incarnation = self.living.pop(rank, "")
        registry = self.home.registry if rank < 2 else self.there
        if incarnation in registry.clients:
            registry.end(registry.clients[incarnation], "it ended", ended=True)

    def forget(self) -> None:
        """The home has not heard of the other kvd for long."""
        for client in list(self.home.registry.clients.values()):
            if client.at is not None:
                self.home.registry.end(client, "not heard of")

    def restart_home(self) -> None:
        """The home's kvd is another process now; its workers register again."""
        fresh = Registry(Events(None, Counter()), settled=0.0)
        self.home.registry = fresh
        for rank in [rank for rank in self.living if rank < 2]:
            self.register(rank)

    async def step(self) -> None:
        """Something happens."""
        rank = self.dice.randrange(4)
        match self.dice.randrange(8):
            case 0 | 1:
                self.begin(rank)
            case 2:
                self.end(rank)
            case 3:
                self.wire.bad = not self.wire.bad
            case 4:
                self.forget()
            case 5:
                self.restart_home()
            case 6:
                await self.homes.close()
                self.restart_there()
                for there in [rank for rank in self.living if rank >= 2]:
                    self.register(there)
            case 7:
                await asyncio.sleep(0)

    def wanted(self) -> str:
        """The generation that one host would give."""
        return generation_of(self.living.values()) if len(self.living) == 4 else ""

    def generations(self) -> tuple[str, str]:
        """What the home and the other kvd take it to be."""
        home, there = self.home.registry.engines.get("e"), self.there.engines.get("e")
        return home.generation if home else "", there.generation if there else ""


@pytest.mark.parametrize("seed", range(40))
def test_both_kvds_end_at_the_generation_of_those_that_live(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "ALIVE_SECONDS", 0.0)
    monkeypatch.setattr(homes, "LEAST_PAUSE_SECONDS", 0.0)
    dice = random.Random(seed)

    async def run() -> None:
        hosts = Hosts(dice)
        for rank in dice.sample(range(4), 4):
            hosts.begin(rank)
        for _ in range(30):
            await hosts.step()
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
        hosts.wire.bad = False
        for rank in set(range(4)) - hosts.living.keys() if dice.random() < 0.8 else ():
            hosts.begin(rank)
        for _ in range(TURNS):
            if hosts.generations() == (hosts.wanted(),) * 2:
                break
            await asyncio.sleep(0.001)
        home, there = hosts.generations()
        assert home == hosts.wanted()
        assert there == (hosts.wanted() if hosts.there.engines.get("e") else "")
        await hosts.homes.close()

    asyncio.run(run())


def test_a_worker_that_is_silent_at_another_kvd_is_silent_and_not_gone() -> None:
    """Its kvd says so twice a second: that is news once, and once again when it is heard of."""

    async def run() -> None:
        hosts = Hosts(random.Random(1))
        hosts.begin(0)
        hosts.living[2] = "two"
        card = worker(ENGINE, 2, "two").card
        told: list[str] = []
        registry = hosts.home.registry
        parts.join_worker(hosts.home, Caller(b"r"), JoinWorker(endpoint=THERE, card=card))
        registry._events.emit = lambda kind, *_, **__: told.append(kind)  # type: ignore[method-assign]
        for reason in ("no heartbeat", "no heartbeat", "", ""):
            registry.clients["two"].last_heard = 0.0
            alive = PartAlive(endpoint=THERE, workers=(PartWorker("two", reason),))
            parts.part_alive(hosts.home, Caller(b"r"), alive)
            assert registry.clients["two"].last_heard > 0.0, "it was spoken of"
        assert told == ["worker.silent", "worker.alive"]
        await hosts.homes.close()

    asyncio.run(run())


class Silent:
    """A kvd that does not answer; ``asked`` counts the questions."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)

    def get(self, _endpoint: Endpoint) -> Silent:
        return self

    async def ask(self, _message: Message, _seconds: float) -> Message:
        self.asked.release()
        raise PeerAway("nobody is there")


def gone_workers(count: int) -> list[Client]:
    """Workers of an engine whose home is elsewhere, each in the place of the one before."""
    cards = [worker(ENGINE, 2, f"{number:032}").card for number in range(count)]
    return [
        Client("worker", ENGINE, c.incarnation, 1, c.incarnation.encode(), rank=c.rank, card=c, home=HOME)
        for c in cards
    ]


def test_what_a_home_is_still_to_hear_of_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that ended while their home was away were kept for as long as one worker lived."""
    monkeypatch.setattr(homes_module, "MOST_GONE", 10)

    async def come_and_go() -> None:
        registry = Registry(Events(None, Counter()), settled=0.0)
        homes = Homes(THERE, registry, cast("PeerLinks", Silent()), Events(None, Counter()), never)
        clients = gone_workers(30)
        for client in clients:
            homes.registered(client, HOME)
        for client in clients[1:]:
            homes.client_gone(client)
        home = homes._homes[HOME]
        assert list(home.gone) == [client.incarnation for client in clients[-10:]]
        await homes.close()

    asyncio.run(come_and_go())


def test_a_home_that_stays_away_need_not_hear_of_those_that_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It misses them by itself, as it does all workers of a kvd that says nothing for so long."""
    monkeypatch.setattr(homes_module, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(homes_module, "ALIVE_SECONDS", 0.0)

    async def come_and_go() -> None:
        registry = Registry(Events(None, Counter()), settled=0.0)
        silent = Silent()
        homes = Homes(THERE, registry, cast("PeerLinks", silent), Events(None, Counter()), never)
        one, two = gone_workers(2)
        homes.registered(one, HOME)
        homes.registered(two, HOME)
        homes.client_gone(two)
        home = homes._homes[HOME]
        assert home.gone
        await silent.asked.acquire()
        await silent.asked.acquire()
        assert not home.gone
        assert list(home.workers) == [one.incarnation]
        await homes.close()

    asyncio.run(come_and_go())


async def never(_engine_id: str, _home: Endpoint, _generation: str) -> None:
    """No engine is looked up."""
