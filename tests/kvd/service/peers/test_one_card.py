"""Two kvds that say the same engine is theirs: whose word counts, and that the engine's clients hear of one alone."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.service.errors import RequestRefused
from kvd.service.peers.one_card import displaced
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import Endpoint, EngineCard
from tests.kvd.service.peers.test_ahead import Pushed
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker

REAL, LIE = b"r" * 32, b"l" * 32
A, B, HERE = Endpoint("a", 1), Endpoint("b", 2), Endpoint()


def card(generation: str = "g", key: bytes = b"", host: str = "test") -> EngineCard:
    ours = msgspec.structs.replace(worker(facts("p"), incarnation="one").card, host=host)
    return EngineCard(engine=facts("p"), generation=generation, workers=(ours,), digest_key=key)


@pytest.mark.parametrize(
    ("new", "there", "trusted", "outcome"),
    [
        (card(), card(key=REAL), (), "kept"),
        (card(key=LIE), card(key=REAL), (), "refused"),
        (card(host="liar"), card(), (), "refused"),
        (card("g2"), card(), (), "kept"),
        (card("g2"), card(), (B,), "refused"),
        (card(key=LIE), card(key=REAL), (B,), "refused"),
        (card(key=REAL), card(key=LIE), (A,), "displaces"),
        (card("g2"), card(), (A,), "displaces"),
        (card("g2"), card(), (A, B), "kept"),
    ],
)
def test_what_becomes_of_a_second_card_of_an_engine(
    new: EngineCard, there: EngineCard, trusted: tuple[Endpoint, ...], outcome: str
) -> None:
    found = displaced(A, new, [(B, there, True)], {HERE, *trusted})
    if outcome == "refused":
        with pytest.raises(
            RequestRefused, match="a:1 and the one at b:2 both say that engine 'p' is theirs"
        ) as refused:
            list(found)
        assert refused.value.code == "KVD-PEER-CONTRADICTION"
    else:
        assert list(found) == ([(B, there)] if outcome == "displaces" else [])


def test_an_engine_that_moved_is_taken_while_the_kvd_that_had_it_is_away() -> None:
    assert list(displaced(A, card("g2"), [(B, card(), False)], {HERE, B})) == []


def ask(kvd: Daemon) -> GetPeer:
    return GetPeer(local_engine="d", engine_id="p", endpoint=kvd.endpoint, keyed=True)


@pytest.mark.parametrize(
    "incarnation", ["one", "another"], ids=["of its generation", "of another generation"]
)
def test_who_answers_at_a_clients_word_does_not_get_before_a_configured_peer(incarnation: str) -> None:
    pushed = Pushed()
    with ExitStack() as stack:
        near, far, liar = stack.enter_context(daemons(3))
        near.kill()
        near.environment["KVD_PEER_CONNECT"] = f"127.0.0.1:{far.port}"
        near.start()
        stack.enter_context(session(liar, worker(facts("p"), incarnation=incarnation)))
        stack.enter_context(session(liar, scheduler(facts("p"), digest_key=LIE)))
        hand = stack.enter_context(session(near, worker(facts("d")), pushed))
        head = stack.enter_context(session(near, scheduler(facts("d"))))
        hand.wait(lambda s: bool(s.engine_generation), 10)
        planted = head.call(ask(liar), 20).result(20)
        assert isinstance(planted, PeerReady)
        assert planted.peer.digest_key == LIE
        stack.enter_context(session(far, worker(facts("p"), incarnation="one")))
        stack.enter_context(session(far, scheduler(facts("p"), digest_key=REAL)))
        wait_for(lambda: any(isinstance(m, PeerGone) for m in pushed.messages), 30)
        wait_for(lambda: isinstance(pushed.messages[-1], PeerReady), 30)
        last = pushed.messages[-1]
        assert isinstance(last, PeerReady)
        assert last.endpoint.port == far.port
        with pytest.raises(RefusedByDaemon, match="both say that engine 'p' is theirs"):
            head.call(ask(liar), 20).result(20)
        answer = head.call(ask(far), 20).result(20)
        assert isinstance(answer, PeerReady)
        assert answer.peer.digest_key == REAL
