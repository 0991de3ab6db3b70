"""Who of two engines exchanges anything with whom, as the comparing process finds it, and where it gives that up."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from kvd.geometry.codec import decode_worker, encode_worker
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.service.peers.comparer import exchange, process
from kvd.service.peers.comparer.exchange import KindsRead, find_exchange
from kvd.service.peers.comparer.messages import CompareSides, Exchange
from kvd.wire.card_parts import part_from
from kvd.wire.handshake import EngineLayout
from kvd.wire.identity import EngineCard, Role
from tests.support.daemons import facts, worker
from tests.support.samples import engine, gated_delta_net, latent, llama

LAYERS = ("layers.0", "layers.1")


def dense(tp: int) -> EngineGeometry:
    return engine("e", ("full", 16, None, llama(LAYERS)), tp=tp)


def mla(tp: int) -> EngineGeometry:
    return engine("e", ("mla", 64, None, latent(LAYERS)), tp=tp)


def hybrid(tp: int) -> EngineGeometry:
    return engine(
        "e", ("full", 16, None, llama(LAYERS)), ("mamba", 16, None, gated_delta_net(("state",))), tp=tp
    )


def card(
    engine_id: str, geometry: EngineGeometry, role: Role = "both", *, spaced: bool = False
) -> EngineCard:
    made = facts(engine_id, tp=geometry.tp, role=role)
    documents = [encode_worker(one) for one in geometry.workers]
    if spaced:
        documents = [document.replace(b',"pages":', b', "pages":') for document in documents]
    workers = tuple(
        msgspec.structs.replace(worker(made, rank).card, geometry=document)
        for rank, document in enumerate(documents)
    )
    return EngineCard(engine=made, generation="g", workers=workers)


def found(local: EngineCard, peer: EngineCard) -> Exchange | None:
    sides = {}
    for number, side in enumerate((peer, local)):
        sides[bool(number)] = process._SideRead(side)
        sides[bool(number)].parts.add(side.engine, part_from(side, 0))
    answer = process.found(CompareSides(), sides)
    assert (answer.bad, answer.refusal) == ((), "")
    return answer.exchange


def partners(
    local: EngineGeometry, peer: EngineGeometry, role: Role = "decode"
) -> tuple[tuple[int, ...], ...]:
    exchange = found(card("d", local, role), card("p", peer))
    assert exchange is not None
    return exchange.partners


def test_each_worker_has_those_that_it_reads_from() -> None:
    assert partners(dense(4), dense(4)) == ((0,), (1,), (2,), (3,))
    assert partners(dense(4), dense(8)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert partners(dense(8), dense(4)) == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))
    assert partners(mla(2), mla(4)) == ((0, 1), (2, 3)), "each its own half of the replicas, layer by layer"
    assert partners(hybrid(4), hybrid(2)) == ((0,), (0,), (1,), (1,))


def test_one_that_may_push_has_those_that_read_from_it_too() -> None:
    # 16 ranks of 8 heads: a head is on two of them, and ranks of 4 read from one of each two.
    assert partners(dense(16), dense(4)) == tuple((at // 4,) for at in range(16))
    for role in ("prefill", "both"):
        both = partners(dense(4), dense(16), role)
        assert all({at * 4, at * 4 + 3} <= set(some) for at, some in enumerate(both))
    assert partners(mla(4), mla(1), "both") == ((0,), (0,), (0,), (0,))
    assert partners(mla(1), mla(4), "decode") == ((0, 1),), "two layers, two of the four replicas"
    assert partners(mla(1), mla(4), "both") == ((0, 1, 2, 3),)


def test_a_layout_holds_each_kind_of_worker_once() -> None:
    exchange = found(card("d", dense(16)), card("p", dense(16)))
    assert exchange is not None
    layout = msgspec.msgpack.decode(exchange.layout, type=EngineLayout)
    assert len(layout.kinds) == 8
    assert layout.of == tuple(at // 2 for at in range(16))
    assert [rank.tp for rank in layout.ranks] == list(range(16))
    assert all(b"4294967296" not in kind.head for kind in layout.kinds), "no address"


def test_memory_makes_no_other_kind_but_the_number_of_blocks_does() -> None:
    whole = mla(4)
    regions = tuple(
        msgspec.structs.replace(whole.workers[1].regions[0], address=1 << 45, device="cuda:1")
        for _ in range(2)
    )
    workers = (
        whole.workers[0],
        dataclasses.replace(whole.workers[1], regions=regions),
        dataclasses.replace(whole.workers[2], num_blocks=7),
        whole.workers[3],
    )
    exchange = found(card("d", whole), card("p", dataclasses.replace(whole, workers=workers)))
    assert exchange is not None
    layout = msgspec.msgpack.decode(exchange.layout, type=EngineLayout)
    assert layout.of == (0, 0, 1, 0)
    assert [b'"num_blocks":7,' in kind.head for kind in layout.kinds] == [False, True]


@pytest.mark.parametrize(
    ("limit", "value"),
    [("MOST_PARTNERS", 3), ("EXCHANGE_SECONDS", -1.0), ("MOST_LAYOUT", 100), ("PART_WORKERS", 3)],
)
def test_what_takes_too_much_is_not_found(monkeypatch: pytest.MonkeyPatch, limit: str, value: float) -> None:
    sides = card("d", dense(4)), card("p", dense(4))
    assert found(*sides) is not None
    monkeypatch.setattr(exchange, limit, value)
    assert found(*sides) is None


def test_after_a_comparison_that_took_long_it_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXCHANGE_SECONDS", 0.0)
    assert found(card("d", dense(4)), card("p", dense(4))) is None


def test_documents_of_another_form_make_no_layout() -> None:
    assert found(card("d", dense(4)), card("p", dense(4), spaced=True)) is None


def changed(document: bytes, form: str) -> bytes:
    said = msgspec.json.decode(document)
    match form:
        case "says its regions again":
            return document[:-1] + b',"regions":' + msgspec.json.encode(said["regions"]) + b"}"
        case "says more":
            return msgspec.json.encode({"format": said.pop("format"), "made_by": "another", **said})
        case _:
            pages = said.pop("pages")
            return msgspec.json.encode({**said, "pages": pages})


@pytest.mark.parametrize("form", ["says its regions again", "says more", "has its groups first"])
def test_a_readable_document_of_another_form_is_compared_and_its_engine_told_whole(form: str) -> None:
    plain = card("p", dense(2))
    odd = [msgspec.structs.replace(one, geometry=changed(one.geometry, form)) for one in plain.workers]
    assert all(decode_worker(one.geometry) for one in odd)
    for workers in (tuple(odd), (plain.workers[0], odd[1])):
        assert found(card("d", dense(2)), msgspec.structs.replace(plain, workers=workers)) is None
    assert found(card("d", dense(2)), plain) is not None


@pytest.mark.parametrize("error", [BadGeometry("why"), MemoryError()])
def test_no_failure_to_find_it_costs_the_verdict(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(exchange, "kind_of", fail)
    assert found(card("d", dense(2)), card("p", dense(2))) is None


def staged() -> EngineGeometry:
    return engine("e", ("full", 16, None, llama(LAYERS)), stages=tuple(frozenset({name}) for name in LAYERS))


def ranked(*ranks: Rank, tp: int = 2, pp: int = 1, dcp: int = 1) -> EngineGeometry:
    """`mla` of two, whose workers say these ranks."""
    workers = [dataclasses.replace(one, rank=rank) for one, rank in zip(mla(2).workers, ranks, strict=True)]
    return dataclasses.replace(mla(2), tp=tp, pp=pp, dcp=dcp, workers=tuple(workers))


@pytest.mark.parametrize(
    ("side", "plain"),
    [
        (staged(), dense(2)),
        (ranked(Rank(tp=0), Rank(tp=1, dcp=1)), mla(2)),
        (ranked(Rank(tp=0), Rank(tp=0, pp=1)), mla(2)),
        (ranked(Rank(tp=1), Rank(tp=0)), mla(2)),
        (ranked(Rank(tp=0), Rank(tp=2)), mla(2)),
        (ranked(Rank(tp=0), Rank(tp=1), pp=2), mla(2)),
        (ranked(Rank(tp=0), Rank(tp=1), dcp=2), mla(2)),
        (ranked(Rank(tp=0), Rank(tp=1), tp=4), mla(2)),
    ],
    ids=["two stages", "dcp", "pp", "another order", "a gap", "says pp", "says dcp", "says another tp"],
)
def test_of_other_than_tensor_parallel_ranks_whole_cards_are_told(
    side: EngineGeometry, plain: EngineGeometry
) -> None:
    for local, peer in ((side, plain), (plain, side), (side, side)):
        kinds = KindsRead()
        for one, geometry in zip(card("p", peer).workers, peer.workers, strict=True):
            kinds.add(one, geometry)
        for pushes in (False, True):
            assert find_exchange(local, peer, kinds, pushes=pushes) is None


def test_a_peer_that_could_not_read_what_it_is_written_is_told_whole() -> None:
    less = engine("e", ("full", 16, None, llama(LAYERS[:1])), tp=2)
    assert found(card("d", less, "decode"), card("p", dense(2))) is not None
    assert found(card("d", less, "both"), card("p", dense(2))) is None
