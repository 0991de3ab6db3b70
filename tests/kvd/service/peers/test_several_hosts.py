"""An engine with workers at two kvds: one of them is its home, and others know the engine by that one alone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.geometry.rank import Rank
from kvd.service.engines.liveness import AWAY_SECONDS
from kvd.service.peers.homes import ALIVE_SECONDS
from kvd.wire.checksum import GetSums, Sums, SumsOf
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import HERE, Endpoint, EngineFacts
from kvd.wire.names import generation_of
from kvd.wire.part import ForWorker, FromWorker, JoinWorker, PartAlive, PartHeard, PartWorker
from kvd.wire.push import PushAnnounce, PushKey, PushProgress
from kvd.wire.query import EngineList, ListEngines
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from kvd.wire.reply import Ok
from tests.support.daemons import Daemon, daemons, facts, measured, scheduler, session, wait_for, worker
from tests.support.hosts import hosts, speaking

ENGINE, OTHER = facts("e", tp=4), facts("d")
GONE_SECONDS = 3.0


@dataclass
class Client:
    """A client of the engine, and what it was sent unasked or was asked."""

    session: KvdSession
    told: list[Message] = field(default_factory=list)

    def heard(self, kind: type[Message]) -> list[Message]:
        """What it was sent of a kind."""
        return [message for message in self.told if isinstance(message, kind)]


@dataclass
class Spread:
    """Four workers, two at each kvd, and the scheduler at the home."""

    home: Daemon
    there: Daemon
    workers: list[Client]
    scheduler: Client

    def ready(self) -> str:
        """The generation, once all workers know it."""
        for client in self.workers:
            client.session.wait(lambda state: bool(state.engine_generation), 10)
        (generation,) = {client.session.state.engine_generation for client in self.workers}
        return generation


def answering(told: list[Message]) -> Callable[[Message], Message | None]:
    """What a worker does with what it is sent: it notes it, and answers what it is asked."""

    def on_push(message: Message) -> Message | None:
        told.append(message)
        if isinstance(message, GetSums):
            return Sums(tokens=7, groups=(bytes([message.rank.tp]),))
        return Ok() if isinstance(message, PushAnnounce | PushProgress) else None

    return on_push


@contextmanager
def spread(home: Daemon, there: Daemon, engine: EngineFacts = ENGINE) -> Iterator[Spread]:
    """An engine over two hosts."""
    with ExitStack() as stack:

        def client(kvd: Daemon, card: RegisterWorker | RegisterScheduler) -> Client:
            told: list[Message] = []
            card = msgspec.structs.replace(card, home=home.endpoint)
            return Client(stack.enter_context(session(kvd, card, answering(told))), told)

        workers = [client(kvd, worker(engine, rank)) for rank, kvd in enumerate((home, home, there, there))]
        yield Spread(home, there, workers, client(home, scheduler(engine)))


@pytest.fixture(scope="module")
def kvds() -> Iterator[list[Daemon]]:
    """Those of two hosts with an engine, and of a third one."""
    with daemons(3) as made:
        yield made


@pytest.fixture
def engine(kvds: list[Daemon]) -> Iterator[Spread]:
    """The engine, ready."""
    with spread(kvds[0], kvds[1]) as made:
        made.ready()
        yield made
    for kvd in kvds[:2]:
        wait_for(lambda kvd=kvd: kvd.engines()["e"].state == "gone", 30)  # type: ignore[misc]


@pytest.fixture
def other(kvds: list[Daemon]) -> Iterator[Client]:
    """An engine of one worker at the third host."""
    told: list[Message] = []
    with session(kvds[2], worker(OTHER), answering(told)) as made:
        made.wait(lambda state: bool(state.engine_generation), 10)
        yield Client(made, told)


def known_to(other: Client, engine: Spread) -> PeerReady:
    """The engine as the other one is told of it, once its kvd has heard that the one of the test before has ended.

    Where a kvd was started anew meanwhile it hears that with the next ping.
    """
    ask, generation = GetPeer(local_engine="d", engine_id="e", endpoint=engine.home.endpoint), engine.ready()

    def told() -> PeerReady | None:
        ready = other.session.call(ask, 10).result(10)
        assert isinstance(ready, PeerReady)
        return ready if ready.peer.generation == generation else None

    ready = wait_for(told)
    other.told.clear()  # that the one before has ended
    return ready


def announcement(key: PushKey, prefiller: str, decoder: str) -> PushAnnounce:
    return PushAnnounce(
        key=key, generations=(prefiller, decoder), tokens=16, computed=0, blocks=(), window=b"", seconds=10.0
    )


def test_kvds_put_an_engine_together_and_its_home_describes_it(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    home, there, _ = kvds
    generation = engine.ready()
    ready = known_to(other, engine)
    assert [card.rank.tp for card in ready.peer.workers] == [0, 1, 2, 3]
    assert generation == generation_of(card.incarnation for card in ready.peer.workers)
    row, part = home.engines(cards=True)["e"], there.engines()["e"]
    assert (row.state, len(row.ranks), row.endpoint) == ("ready", 4, home.endpoint)
    assert row.card is not None
    assert len(row.card.workers) == 4
    assert (part.state, len(part.ranks), part.endpoint) == ("ready", 2, home.endpoint)
    assert part.generation == row.generation == generation
    card = wait_for(lambda: there.engines(cards=True)["e"].card)
    assert card == row.card, "operators are shown the same at either kvd"
    listed = there.ask(ListEngines())
    assert isinstance(listed, EngineList)
    assert [r.local for r in listed.rows if r.engine.engine_id == "e"] == [True], "and once"
    at = {w.rank.tp: w.at for w in home.workers() if w.engine_id == "e" and w.rank and w.state == "alive"}
    assert at == {0: None, 1: None, 2: there.endpoint, 3: there.endpoint}


def test_a_kvd_that_is_not_the_home_names_the_one_that_is(engine: Spread, other: Client) -> None:
    ask = GetPeer(local_engine="d", engine_id="e", endpoint=engine.there.endpoint)
    refused = other.session.call(ask, 10).exception(10)
    assert isinstance(refused, RefusedByDaemon)
    assert refused.code == "KVD-ENGINE-PARTIAL"
    assert str(engine.home.endpoint) in refused.refusal.hint


def test_a_worker_at_another_host_asks_for_a_peer_and_all_workers_are_told(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    ask = GetPeer(local_engine="e", engine_id="d", endpoint=kvds[2].endpoint)
    ready = engine.workers[3].session.call(ask, 10).result(10)
    assert isinstance(ready, PeerReady)
    assert ready.part is not None, "between kvds a card goes in parts"
    assert len(ready.part.rows) == 1
    for client in (*engine.workers[:3], engine.scheduler):
        wait_for(lambda client=client: client.heard(PeerReady))  # type: ignore[misc]
    other.session.close()
    for client in (*engine.workers, engine.scheduler):
        wait_for(lambda client=client: client.heard(PeerGone))  # type: ignore[misc]


def test_a_push_reaches_all_workers_and_each_one_s_progress_the_decoder(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    generation = known_to(other, engine).peer.generation
    key = PushKey(
        transfer_id="t", prefiller="e", prefiller_endpoint=engine.home.endpoint, decoder="d", rank=Rank()
    )
    mine = other.session.state.engine_generation
    assert other.session.call(announcement(key, generation, mine), 10).result(10) == Ok()
    for rank, client in enumerate(engine.workers):
        (announced,) = client.heard(PushAnnounce)
        assert isinstance(announced, PushAnnounce)
        assert announced.key.decoder_endpoint == kvds[2].endpoint
        progress = PushProgress(key=announced.key, source=Rank(rank), quiesced=True)
        assert client.session.call(progress, 10).result(10) == Ok()
    sources = [m.source.tp for m in other.heard(PushProgress) if isinstance(m, PushProgress)]
    assert sources == [0, 1, 2, 3]


def test_a_worker_at_another_host_announces_a_push_and_hears_of_its_progress(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    key = PushKey(
        transfer_id="u", prefiller="d", prefiller_endpoint=kvds[2].endpoint, decoder="e", rank=Rank(2)
    )
    message = announcement(key, other.session.state.engine_generation, engine.ready())
    assert engine.workers[2].session.call(message, 10).result(10) == Ok()
    (announced,) = other.heard(PushAnnounce)
    assert isinstance(announced, PushAnnounce)
    assert announced.key.decoder_endpoint == engine.home.endpoint, "others know the home alone"
    progress = PushProgress(key=announced.key, source=Rank(), quiesced=True)
    assert other.session.call(progress, 10).result(10) == Ok()
    assert engine.workers[2].heard(PushProgress) == [progress]
    as_another = msgspec.structs.replace(message, key=msgspec.structs.replace(key, rank=Rank(1)))
    refused = engine.workers[2].session.call(as_another, 10).exception(10)
    assert isinstance(refused, RefusedByDaemon)
    assert refused.code == "KVD-NOT-OWNER"


def test_checksums_are_asked_of_a_worker_at_another_host_and_by_one(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    generation = known_to(other, engine).peer.generation

    def question(engine_id: str, generation: str, endpoint: Endpoint, rank: int) -> GetSums:
        return GetSums(
            engine_id=engine_id, generation=generation, endpoint=endpoint, rank=Rank(rank), request_id="r",
            wanted=(SumsOf(0, 0, 1),),
        )  # fmt: skip

    asked = question("e", generation, engine.home.endpoint, 3)
    assert other.session.call(asked, 10).result(10) == Sums(tokens=7, groups=(b"\x03",))
    back = question("d", other.session.state.engine_generation, kvds[2].endpoint, 0)
    introduced = GetPeer(local_engine="e", engine_id="d", endpoint=kvds[2].endpoint, first=0)
    assert isinstance(engine.workers[2].session.call(introduced, 10).result(10), PeerReady)
    assert engine.workers[2].session.call(back, 10).result(10) == Sums(tokens=7, groups=(b"\x00",))


def test_a_worker_that_ends_at_another_host_ends_the_generation_at_once(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    known_to(other, engine)
    began = time.monotonic()
    engine.workers[3].session.close()
    (gone,) = wait_for(lambda: other.heard(PeerGone))
    measured("a worker at another host that ends is told of", time.monotonic() - began)
    assert isinstance(gone, PeerGone)
    assert "e/tp3: it said goodbye" in gone.reason
    wait_for(lambda: not engine.workers[2].session.state.engine_generation)
    assert [e.state for e in (kvds[0].engines()["e"], kvds[1].engines()["e"])] == ["partial", "partial"]


@pytest.mark.parametrize("killed", ["home", "there"])
def test_a_kvd_that_is_soon_started_anew_costs_nothing(
    engine: Spread, other: Client, killed: Literal["home", "there"]
) -> None:
    """One that takes longer costs a pause: the generation that comes back is the same."""
    generation = known_to(other, engine).peer.generation
    kvd: Daemon = getattr(engine, killed)
    began = time.monotonic()
    kvd.kill()
    kvd.start()
    for host in (engine.home, engine.there):
        wait_for(lambda host=host: [r for r in host.engines().values() if r.local and r.state == "ready"])  # type: ignore[misc]
    seconds = time.monotonic() - began
    assert engine.ready() == generation
    asked = GetPeer(local_engine="d", engine_id="e", endpoint=engine.home.endpoint, generation=generation)
    assert isinstance(other.session.call(asked, 10).result(10), PeerReady)
    ended = [
        one for one in other.heard(PeerGone) if isinstance(one, PeerGone) and one.generation == generation
    ]
    assert seconds > AWAY_SECONDS - ALIVE_SECONDS or not ended


def test_an_engine_ends_with_a_host_of_it_within_three_seconds_and_returns_with_it(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    """The host does not say anything any more. Its workers live, so what comes back is the same generation."""
    generation = known_to(other, engine).peer.generation
    kvds[1].signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        (gone,) = wait_for(lambda: other.heard(PeerGone))
        seconds = time.monotonic() - began
    finally:
        kvds[1].signal(signal.SIGCONT)
    measured("a host that is gone is told of", seconds)
    assert seconds < GONE_SECONDS
    assert isinstance(gone, PeerGone)
    assert gone.generation == generation
    assert str(kvds[1].endpoint) in gone.reason
    wait_for(lambda: kvds[0].engines()["e"].state == "ready")
    assert engine.ready() == generation
    assert known_to(other, engine).peer.generation == generation


def test_workers_at_other_hosts_leave_with_the_last_process_at_the_home(
    kvds: list[Daemon], engine: Spread, other: Client
) -> None:
    known_to(other, engine)
    for client in (*engine.workers[:2], engine.scheduler):
        client.session.close()
    wait_for(lambda: other.heard(PeerGone))
    wait_for(lambda: kvds[0].engines()["e"].state == "gone")
    why = wait_for(lambda: kvds[1].engines()["e"].reason)
    assert "has no process here" in wait_for(lambda: kvds[1].engines()["e"].reason), why


def test_a_host_speaks_for_workers_of_its_own_and_a_home_for_engines_of_its_own() -> None:
    with (
        hosts("home", "there", "stranger") as known,
        spread(known["home"].daemon, known["there"].daemon) as engine,
        session(known["home"].daemon, worker(facts("alone", tp=2))),
        speaking(known["stranger"].pair, known["home"]) as to_home,
        speaking(known["stranger"].pair, known["there"]) as to_there,
    ):
        generation, there, stranger = engine.ready(), engine.there.endpoint, known["stranger"].daemon.endpoint
        (victim,) = (row.incarnation for row in engine.there.workers() if row.rank == Rank(3))
        gone = (PartWorker(victim, "I say so"),)
        mine, another = worker(ENGINE, 3).card, worker(facts("alone", tp=2), 1).card
        peer = GetPeer(local_engine="e", engine_id="e", endpoint=stranger)
        refusals = [
            to_home.refused(JoinWorker(endpoint=there, card=mine)),
            to_home.refused(PartAlive(endpoint=there, workers=(), gone=gone)),
            to_home.refused(FromWorker(endpoint=there, incarnation=victim, message=peer)),
            to_there.refused(
                ForWorker(incarnation=victim, message=PeerGone(engine_id="p", generation="g", reason=""))
            ),
            to_home.refused(FromWorker(endpoint=stranger, incarnation=victim, message=peer)),
            to_home.refused(JoinWorker(endpoint=stranger, card=mine)),
            to_home.refused(JoinWorker(endpoint=stranger, card=another)),
        ]
        assert [refusal.code for refusal in refusals] == [
            *["KVD-NOT-YOUR-ENGINE"] * 4, "KVD-NOT-REGISTERED", "KVD-RANK-TAKEN", "KVD-ENGINE-UNKNOWN",
        ]  # fmt: skip
        assert str(there) in refusals[5].message
        assert "on this host alone" in refusals[6].message
        heard = to_home.ask(PartAlive(endpoint=stranger, workers=(PartWorker(victim),), gone=gone))
        assert heard == PartHeard(unknown=(victim,))
        assert engine.home.engines()["e"].generation == generation


def test_processes_of_an_engine_have_to_name_one_home(kvds: list[Daemon]) -> None:
    home, there, _ = kvds
    named = msgspec.structs.replace(scheduler(facts("x")), home=home.endpoint)
    refused = there.ask_refused(named)
    assert refused.code == "KVD-ENGINE-CONFLICT"
    assert f"names the kvd at {home.endpoint}" in refused.message
    engine = facts("x", tp=2)
    with session(home, worker(engine)):
        refused = home.ask_refused(msgspec.structs.replace(worker(engine, 1), home=HERE))
    assert refused.code == "KVD-ENGINE-CONFLICT"
    assert "with its scheduler at this kvd, but x/tp0 that it is on this host alone" in refused.message
