"""A card in parts is the card again; parts that make none are refused with what is wrong."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire import card_parts
from kvd.wire.card_parts import Gathering, card_bytes, part_bytes, part_from, with_workers
from kvd.wire.errors import BadCard
from kvd.wire.handshake import CardPart
from kvd.wire.identity import EngineCard
from tests.support.daemons import facts, worker


def card(workers: int) -> EngineCard:
    engine = facts("p", tp=workers)
    return EngineCard(
        engine=engine, generation="g", workers=tuple(worker(engine, rank).card for rank in range(workers))
    )


@pytest.mark.parametrize("limit", [1, 1000, 5000, 1 << 20])
def test_parts_make_the_card_again(limit: int) -> None:
    whole, gathering, count = card(40), Gathering(), 0
    while True:
        part = part_from(whole, len(gathering.workers), limit)
        assert len(msgspec.msgpack.encode(part)) <= part_bytes(part)
        count += 1
        if gathering.add(whole.engine, part):
            break
    assert with_workers(whole, gathering.workers) == whole
    assert (count == 40) == (limit == 1)
    assert len(msgspec.msgpack.encode(whole)) <= card_bytes(whole)


def test_what_workers_share_stands_in_a_part_once() -> None:
    whole = card(64)
    part = part_from(whole, 0)
    assert (part.next, len(part.tails)) == (64, 1)
    assert len(msgspec.msgpack.encode(part)) * 2 < len(msgspec.msgpack.encode(whole))


def spoilt(**changed: object) -> CardPart:
    return msgspec.structs.replace(part_from(card(4), 0), **changed)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (spoilt(first=1), "begins with worker 1, wanted was 0"),
        (spoilt(total=1 << 20), "1048576 workers, at most 65536"),
        (spoilt(rows=()), "4 of 4 are missing"),
        (spoilt(total=3), "4 workers of an engine of 3"),
        (spoilt(tails=()), "names tail 0 of 0"),
    ],
)
def test_parts_that_make_no_card_are_refused(part: CardPart, why: str) -> None:
    with pytest.raises(BadCard, match=why):
        Gathering().add(facts("p", tp=4), part)


def test_a_short_message_does_not_become_a_large_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_parts, "MAX_CARD_BYTES", 1000)
    with pytest.raises(BadCard, match="at most 1000"):
        Gathering().add(facts("p", tp=40), part_from(card(40), 0))


def test_a_tail_that_no_worker_has_is_refused() -> None:
    part = part_from(card(4), 0)
    with pytest.raises(BadCard, match="tail 1 of 2 is no worker's"):
        Gathering().add(facts("p", tp=4), msgspec.structs.replace(part, tails=(*part.tails, b"x")))


def test_what_a_part_takes_is_counted_as_it_is_in_memory() -> None:
    """A wide character makes each of a text's take four bytes, also where the wire has one for each."""
    gathering, part = Gathering(), part_from(card(4), 0)
    wide = tuple(
        msgspec.structs.replace(row, host="h" * 499 + "\U0001f600", backend="b" * 500) for row in part.rows
    )
    gathering.add(facts("p", tp=4), msgspec.structs.replace(part, rows=wide))
    assert gathering.kept > 4 * (4 * 500 + 500)
    assert gathering.bytes > gathering.kept, "what the workers share counts for each of them"


def test_workers_that_are_taken_apart_are_the_card_and_share_what_they_can() -> None:
    whole, gathering = card(40), Gathering()
    assert gathering.add(whole.engine, part_from(whole, 0))
    workers = list(gathering.taken_apart())
    assert with_workers(whole, workers) == whole
    assert gathering.workers == []
    assert len({id(one.host) for one in workers}) == 1
