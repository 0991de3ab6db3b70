"""What operators are told of engines: a card is of an engine that can be described."""

from __future__ import annotations

import time

from kvd.service.handlers import queries
from kvd.service.peers.peer_engine import PeerEngine
from kvd.service.peers.peer_store import PeerStore
from kvd.service.sockets.router import Caller
from kvd.wire.frame import decode, encode
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.query import EngineList, EngineRow, ListEngines
from tests.support.crowded_host import host
from tests.support.daemons import facts, worker


def test_a_peer_that_has_gone_for_a_while_is_listed_without_a_card() -> None:
    """Its workers' cards are released after a minute: what was left looked like another model's engine."""
    key = (Endpoint("one", 1), "p")
    card = EngineCard(engine=facts("p", tp=1), generation="g", workers=(worker(facts("p", tp=1), 0).card,))
    with host() as (here, run):
        peers = PeerStore()
        here.daemon.handshakes.peers = peers

        async def listed() -> EngineRow:
            answer = await queries.list_engines(here.daemon, Caller(b""), ListEngines(cards=True))
            listing, _ = decode(encode(answer, 1))  # rows are packed one by one
            assert isinstance(listing, EngineList)
            [row] = listing.rows
            return row

        peers.put(key, PeerEngine(card, size=10))
        peers.end(key, "why")
        just_gone = run(listed())
        assert just_gone.card is not None
        peers.shed(time.time() + 1)
        row = run(listed())
        assert (row.state, row.reason, row.card) == ("gone", "why", None)
