"""Room for peers: who is not used makes place, who is used stays; and greetings are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvd.service.errors import RequestRefused
from kvd.service.peers import greetings, room
from kvd.service.peers.greetings import Greetings
from kvd.service.peers.peer_engine import Key, PeerEngine
from kvd.service.peers.room import room_for
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint, EngineCard
from tests.support.daemons import facts

ONE, OTHER = Endpoint("one", 1), Endpoint("other", 1)


def known(*keys: Key, used: tuple[Key, ...] = ()) -> dict[Key, PeerEngine]:
    peers = {}
    for number, key in enumerate(keys):
        peer = PeerEngine(EngineCard(engine=facts(key[1]), generation="g", workers=()), size=10)
        peer.since = float(number)
        peer.users = {"d": "g"} if key in used else {}
        peers[key] = peer
    return peers


def test_the_oldest_that_nobody_uses_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_OF_ONE", 3)
    a, b, c, d = ((ONE, name) for name in "abcd")
    peers = known(a, b, c, used=(a,))
    assert room_for(peers, d, 10) == [b]
    del peers[b]
    assert not room_for(peers, a, 10), "its own earlier card does not count"


def test_where_all_are_used_one_more_is_refused_with_figure_and_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "MOST_BYTES_OF_ONE", 25)
    a, b = (ONE, "a"), (ONE, "b")
    peers = known(a, b, used=(a, b))
    with pytest.raises(
        RequestRefused, match="2 engines in use here, with cards of 20 bytes; one more of 10 bytes"
    ):
        room_for(peers, (ONE, "c"), 10)
    assert not room_for(peers, (OTHER, "c"), 10)
    assert list(peers) == [a, b]


def test_what_is_kept_for_one_kvd_is_counted_in_the_room_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_OF_ONE", 1)
    monkeypatch.setattr(room, "MOST", 2)
    a, b = (ONE, "a"), (OTHER, "b")
    peers = known(a, b, used=(b,))
    assert room_for(peers, (ONE, "c"), 10) == [a]


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
