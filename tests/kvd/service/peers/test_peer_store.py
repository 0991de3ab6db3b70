"""Peers that are known: found by kvd and by id; who is unused makes place, who is used stays. Greetings are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvd.service.errors import RequestRefused
from kvd.service.peers import greetings, peer_store
from kvd.service.peers.greetings import Greetings
from kvd.service.peers.peer_engine import PeerEngine, PeerEngineKey
from kvd.service.peers.peer_store import PeerStore
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import HERE, Endpoint, EngineCard
from tests.support.daemons import facts, worker

ONE, OTHER = Endpoint("one", 1), Endpoint("other", 1)


def known(*keys: PeerEngineKey, used: tuple[PeerEngineKey, ...] = ()) -> PeerStore:
    peers = PeerStore()
    for number, key in enumerate(keys):
        peer = PeerEngine(EngineCard(engine=facts(key[1]), generation="g", workers=()), size=10)
        peer.since = float(number)
        peer.users = {"d": "g"} if key in used else {}
        peers.put(key, peer)
    return peers


def test_peers_are_found_by_their_kvd_and_by_their_id_until_they_are_dropped() -> None:
    a, b, other = (ONE, "a"), (ONE, "b"), (OTHER, "a")
    peers = known(a, b, other)
    again = PeerEngine(EngineCard(engine=facts("a"), generation="h", workers=()), size=30)
    peers.put(a, again)
    assert (len(peers), set(peers)) == (3, {a, b, other})
    assert peers.get(a) is peers.at(ONE)["a"] is peers.named("a")[ONE] is again
    assert (set(peers.at(ONE)), set(peers.named("a"))) == ({"a", "b"}, {ONE, OTHER})
    for key in (a, a, b, other):
        peers.drop(key)
    assert (len(peers), [*peers], dict(peers.at(ONE)), dict(peers.named("a"))) == (0, [], {}, {})


def test_room_is_counted_in_what_is_known_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "MOST_BYTES_OF_ONE", 40)
    a, b = (ONE, "a"), (ONE, "b")
    peers = known(a, b, used=(a, b))
    assert not peers.room_for((ONE, "c"), 20)
    peers.put(
        a, PeerEngine(EngineCard(engine=facts("a"), generation="h", workers=()), size=30, users={"d": "g"})
    )
    with pytest.raises(RequestRefused, match="cards of 40 bytes"):
        peers.room_for((ONE, "c"), 1)
    peers.drop(b)
    assert not peers.room_for((ONE, "c"), 10)


def test_the_oldest_that_nobody_uses_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "MOST_OF_ONE", 3)
    a, b, c, d = ((ONE, name) for name in "abcd")
    peers = known(a, b, c, used=(a,))
    assert peers.room_for(d, 10) == [b]
    peers.drop(b)
    assert not peers.room_for(a, 10), "its own earlier card does not count"


def test_where_all_are_used_one_more_is_refused_with_figure_and_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_store, "MOST_BYTES_OF_ONE", 25)
    a, b = (ONE, "a"), (ONE, "b")
    peers = known(a, b, used=(a, b))
    with pytest.raises(
        RequestRefused, match="2 engines in use here, with cards of 20 bytes; one more of 10 bytes"
    ):
        peers.room_for((ONE, "c"), 10)
    assert not peers.room_for((OTHER, "c"), 10)
    assert list(peers) == [a, b]


def test_what_is_kept_for_one_kvd_is_counted_in_the_room_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "MOST_OF_ONE", 1)
    monkeypatch.setattr(peer_store, "MOST", 2)
    a, b = (ONE, "a"), (OTHER, "b")
    peers = known(a, b, used=(b,))
    assert peers.room_for((ONE, "c"), 10) == [a]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_greeting_is_made_once_at_a_time_and_too_many_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greetings, "MOST_OF_ONE", 2)
    counters: Counter[str] = Counter()
    made: list[str] = []

    async def get(ask: GetPeer) -> None:
        await asyncio.sleep(0)
        made.append(ask.engine_id)

    async def run() -> None:
        greeting = Greetings(get, counters)
        for name in "aabc":
            greeting.greet(GetPeer(local_engine="d", engine_id=name, endpoint=ONE))
        greeting.greet(GetPeer(local_engine="d", engine_id="o", endpoint=OTHER))
        await turns()
        greeting.greet(GetPeer(local_engine="d", engine_id="c", endpoint=ONE))
        await turns()

    asyncio.run(run())
    assert (made, counters["handshakes.greetings_dropped"]) == (["a", "b", "o", "c"], 1)


def ended(peers: PeerStore, key: PeerEngineKey) -> PeerEngine:
    """An engine of two workers that was known, and has gone."""
    cards = tuple(worker(facts(key[1], tp=2), rank).card for rank in range(2))
    peer = PeerEngine(EngineCard(engine=cards[0].engine, generation="g", workers=cards))
    peer.answer("d", ONE, 0.0, brief=False, first=0)
    peers.put(key, peer)
    peers.end(key, "why")
    return peer


def test_the_card_of_who_has_gone_is_there_for_late_records_and_then_released() -> None:
    """It stayed for `remember_seconds`, with what was ready to be told of it."""
    peers = PeerStore()
    for where in (ONE, HERE):
        gone = ended(peers, (where, "a"))
        assert (gone.state, gone.reason, len(gone.card.workers)) == ("gone", "why", 2)
        assert not gone._answers
        peers.shed(gone.since)
        assert gone.card.workers, "it has only just gone"
        peers.shed(gone.since + 1)
        assert (gone.card.workers, gone.card.generation, gone.card.engine.engine_id) == ((), "g", "a")
        peers.drop((where, "a"))
    assert (peers._bytes.total, peers._ended.total) == (0, 0)


def test_the_cards_of_many_that_have_gone_are_released_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = PeerStore()
    first = ended(peers, (ONE, "first"))
    monkeypatch.setattr(peer_store, "ENDED_BYTES", 2 * first.size)
    kept = [ended(peers, (HERE, f"p{number}")) for number in range(4)]
    assert not first.card.workers
    assert [bool(peer.card.workers) for peer in kept] == [False, False, True, True]


def test_cards_of_this_host_take_no_room_from_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are its clients' cards: one object, which counts as theirs."""
    monkeypatch.setattr(peer_store, "MOST_BYTES", 40)
    peers = known((HERE, "a"), (HERE, "b"), (HERE, "c"), (HERE, "d"), used=tuple((HERE, n) for n in "abcd"))
    assert not peers.room_for((ONE, "p"), 40)
