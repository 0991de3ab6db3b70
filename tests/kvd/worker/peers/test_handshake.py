"""Asking kvd for a peer: its card in parts, and parts that make none."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import cast

import msgspec
import pytest

from kvd.client.cards import CardReader, engine_geometry
from kvd.geometry import alike
from kvd.topology.transfer_topology import TransferTopology
from kvd.wire.card_parts import ToldCard, part_from
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, EngineCard
from kvd.worker.cause import Cause
from kvd.worker.peers.followed import register
from kvd.worker.peers.handshake import ask_for_peer
from kvd.worker.session import SessionProtocol
from tests.support.daemons import facts, worker


class Answers:
    """A session whose kvd answers with one part after the other: from the worker asked for, and ``late`` later."""

    def __init__(self, card: EngineCard, late: int = 0) -> None:
        self.card, self.late = card, late

    def call(self, question: GetPeer, _seconds: float) -> Future[Message]:
        part = part_from(self.card, (question.first or 0) + self.late, limit=1)
        facts_alone = msgspec.structs.replace(self.card, workers=())
        answer: Future[Message] = Future()
        answer.set_result(PeerReady(local_engine="d", peer=facts_alone, endpoint=Endpoint("h", 1), part=part))
        return answer


def asked(late: int = 0) -> tuple[EngineCard, ToldCard | Cause]:
    engine = facts("p", tp=3)
    card = EngineCard(
        engine=engine, generation="g", workers=tuple(worker(engine, rank).card for rank in range(3))
    )
    found: list[ToldCard | Cause] = []
    session = cast("SessionProtocol", Answers(card, late))
    ask_for_peer(session, GetPeer(local_engine="d", engine_id="p"), 5.0, found.append)
    (answer,) = found
    return card, answer


def test_a_card_in_parts_is_asked_for_until_it_is_whole() -> None:
    card, found = asked()
    assert isinstance(found, ToldCard)
    assert (found.engine, found.generation) == (card.engine, card.generation)
    assert found.whole == found.whole == card


def test_parts_that_make_no_card_are_a_miss_and_say_what_is_wrong_with_them() -> None:
    _, found = asked(late=1)
    assert found == Cause("peer p: a part begins with worker 1, wanted was 0", "PEER_AWAY")


def test_what_a_card_has_in_common_with_an_earlier_one_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, told = asked()
    local = engine_geometry(card)
    topology = TransferTopology(replace(local, engine_id="d"), local.workers[0].rank)
    reader = CardReader()
    assert isinstance(told, ToldCard)
    first = register(topology, told, reader)
    assert first.geometry.workers == local.workers
    monkeypatch.setattr(alike, "decode_worker", None)
    again = msgspec.structs.replace(card, generation="h")
    second = register(topology, ToldCard(again), reader)
    assert (second.geometry.workers, second.geometry.generation) == (local.workers, "h")
    assert second.metadata == {worker.rank: worker.metadata for worker in card.workers}
