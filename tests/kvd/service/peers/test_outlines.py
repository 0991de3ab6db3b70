"""Workers that take outlines are told their partners in full; everybody else is told as before."""

from __future__ import annotations

import tracemalloc
from contextlib import ExitStack

import msgspec
import pytest

from kvd.client.cards import CardReader
from kvd.client.session import KvdSession
from kvd.geometry.codec import encode_worker
from kvd.geometry.rank import Rank
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.peers import exchanges
from kvd.service.peers.answering import Addressee, answer
from kvd.service.peers.comparer.messages import Exchange
from kvd.service.peers.comparer.pool import Whose
from kvd.service.peers.exchanges import Exchanges
from kvd.service.peers.peer_engine import PeerEngine
from kvd.wire import card_parts
from kvd.wire.card_parts import ToldCard
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import HERE, EngineCard
from kvd.wire.registration import RegisterWorker
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker
from tests.support.samples import engine, llama

TP = 4
SOMEBODY = Whose(HERE, frozenset({1}))
GEOMETRY = engine("e", ("full", 16, None, llama(("layers.0",))), tp=TP)


def presented(engine_id: str, rank: int, *, parts: bool = True, outlines: bool = True) -> RegisterWorker:
    made = worker(facts(engine_id, tp=TP), rank)
    card = msgspec.structs.replace(
        made.card, geometry=encode_worker(GEOMETRY.workers[rank]), metadata=b"of %d" % rank
    )
    return msgspec.structs.replace(made, card=card, parts=parts, outlines=outlines)


def ask(one: KvdSession, kvd: Daemon, first: int | None = 0) -> PeerReady:
    question = GetPeer(local_engine="d", engine_id="p", endpoint=kvd.endpoint, first=first)
    ready = one.call(question, 20).result(20)
    assert isinstance(ready, PeerReady)
    return ready


def test_each_is_told_in_the_form_that_it_takes_and_the_next_generation_too() -> None:
    pushed: list[PeerReady] = []

    def hears(message: Message) -> None:
        if isinstance(message, PeerReady):
            pushed.append(message)

    with daemons(2) as (near, far), ExitStack() as stack:
        there = ExitStack()
        for rank in range(TP):
            there.enter_context(session(far, presented("p", rank)))
        forms = {0: (True, True), 1: (True, False), 2: (False, False)}
        mine = [
            stack.enter_context(session(near, presented("d", rank, parts=parts, outlines=outlines)))
            for rank, (parts, outlines) in forms.items()
        ]
        stack.enter_context(session(near, presented("d", 3), hears))
        first = ask(mine[0], far)
        assert first.outline is not None
        assert (first.part, first.peer.workers) == (None, ())
        assert [(row.rank, row.metadata) for row in first.outline.rows] == [(Rank(tp=0), b"of 0")]
        geometry = CardReader().geometry(ToldCard(first.peer, outline=first.outline))
        assert geometry.workers[0] == GEOMETRY.workers[0]
        assert [one.rank for one in geometry.workers] == [one.rank for one in GEOMETRY.workers]
        second = ask(mine[1], far)
        assert (second.outline, second.part and second.part.total) == (None, TP)
        third = ask(mine[2], far, first=None)
        assert (third.outline, len(third.peer.workers)) == (None, TP)
        rest = ask(mine[0], far, first=1)  # the rest of a card in parts
        assert (rest.outline, rest.part and rest.part.first) == (None, 1)
        told = wait_for(lambda: pushed)[0]
        assert told.outline is not None
        assert [row.metadata for row in told.outline.rows] == [b"of 3"]
        there.close()
        for rank in range(TP):
            stack.enter_context(session(far, presented("p", rank)))
        again = ask(mine[0], far)
        assert again.outline is not None
        assert again.peer.generation != first.peer.generation
        assert again.outline.layout == first.outline.layout
        assert near.status().counters["handshakes.comparisons"] == 1
        stack.enter_context(session(near, scheduler(facts("d", tp=TP))))


def test_a_worker_of_before_says_nothing_of_outlines_and_a_kvd_of_before_ignores_what_is_said() -> None:
    new = presented("d", 0)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(new))
    assert fields.pop("outlines") is True
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=RegisterWorker)
    assert old.outlines is False
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode({**fields, "of a later version": 1}), type=RegisterWorker
    ) == old  # fmt: skip


def local(*, outlines: bool = True, shape: str = "here") -> tuple[LocalEngine, Client]:
    made = LocalEngine(facts("d"), generation="g", shape=shape)
    card = worker(facts("d")).card
    client = Client(
        "worker", card.engine, card.incarnation, 1, b"route", rank=card.rank, card=card, outlines=outlines
    )
    made.workers[Rank()] = client
    made.ranks.append(Rank())
    return made, client


def peer(shape: str = "there") -> PeerEngine:
    card = worker(facts("p")).card
    return PeerEngine(EngineCard(engine=card.engine, generation="h", workers=(card,)), shape=shape)


def known() -> Exchanges:
    made = Exchanges()
    made.keep(SOMEBODY, ("here", "there"), Exchange(b"layout", ((0,),)))
    return made


def test_the_whole_card_is_told_where_it_is_not_known_what_a_worker_needs() -> None:
    mine, client = local()
    told = answer(peer(), HERE, Addressee(mine, client, 0), 0.0, known())
    assert told.outline is not None
    assert (told.outline.shape, told.outline.layout) == ("there", b"layout")
    of_another_engine = local()[1]
    for engine_, asker, other, found in (
        (mine, client, peer(), Exchanges()),  # an engine that was compared before, or is large
        (mine, client, peer(shape=""), known()),
        (*local(shape=""), peer(), known()),  # its workers are on several hosts
        (*local(outlines=False), peer(), known()),
        (mine, of_another_engine, peer(), known()),
        (mine, None, peer(), known()),
    ):
        told = answer(other, HERE, Addressee(engine_, asker, 0), 0.0, found)
        assert told.outline is None
        assert told.part is not None


def test_what_is_kept_is_bounded_by_its_bytes_and_what_was_asked_for_last_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchanges, "KEPT_BYTES", 15_000)
    made, card = Exchanges(), peer().card
    for number in range(100):
        made.keep(SOMEBODY, ("here", str(number)), Exchange(b"x" * 1000, ((0,),) * 20))
        assert made.outline(("here", "0"), 0, card) is not None
    kept = [number for number in range(100) if made.outline(("here", str(number)), 0, card) is not None]
    assert kept[0] == 0
    assert kept[1:] == list(range(100 - len(kept) + 1, 100))
    assert 5 <= len(kept) <= 10
    made.keep(SOMEBODY, ("here", "0"), Exchange(b"x" * 1000, ((0,),) * 20))  # as by two comparisons at once
    assert made._sizes.total == sum(one.size for one in made._kept.values()) <= 15_000
    assert made.outline(("here", "0"), 20, card) is None, "no worker stands there"


def test_one_users_many_pairs_push_out_nothing_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "KEPT_BYTES", 15_000)
    made, card = Exchanges(), peer().card
    made.keep(SOMEBODY, ("here", "there"), Exchange(b"layout", ((0,),)))
    for number in range(100):
        made.keep(Whose(HERE, frozenset({7})), ("here", str(number)), Exchange(b"x" * 1000, ((0,),)))
    assert made.outline(("here", "there"), 0, card) is not None
    assert made.outline(("here", "0"), 0, card) is None


def test_as_many_bytes_are_counted_as_small_pairs_take() -> None:
    made, alike = Exchanges(), ((),)
    tracemalloc.start()
    try:
        for number in range(10_000):
            pair = f"{number % 30:032x}", f"{number // 30:032x}"
            made.keep(SOMEBODY, pair, Exchange(b"%d" % number, alike))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < made._sizes.total < 2 * taken


def test_an_outline_that_is_larger_than_a_part_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, client = local()
    assert answer(peer(), HERE, Addressee(mine, client, 0), 0.0, known()).outline is not None
    monkeypatch.setattr(card_parts, "PART_BYTES", 100)
    told = answer(peer(), HERE, Addressee(mine, client, 0), 0.0, known())
    assert told.outline is None
    assert told.part is not None
