"""What the process that compares engines makes of cards."""

from __future__ import annotations

import msgspec
import pytest

from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.peers.comparer import process
from kvd.service.peers.comparer.messages import CompareSides, FindShape, Found
from kvd.wire.card_parts import part_from
from kvd.wire.identity import EngineCard, WorkerCard
from tests.support.daemons import facts, worker


def card(engine_id: str, *workers: WorkerCard, model: str = "tiny") -> EngineCard:
    engine = facts(engine_id, tp=max(1, len(workers)), model=model)
    return EngineCard(engine=engine, generation="g", workers=workers or (worker(engine).card,))


def compared(local: EngineCard, peer: EngineCard, job: FindShape | CompareSides) -> Found:
    sides = {}
    for number, side in enumerate((peer, local)):
        sides[bool(number)] = process._SideRead(side)
        sides[bool(number)].parts.add(side.engine, part_from(side, 0))
    return process.found(job, sides)


def demanding() -> bytes:
    """A geometry that is consistent with itself and that nobody can plan: a head of 2 ** 26 tokens."""
    tokens = 1 << 26
    axes = (Axis("head", 0, 1, 1, 4), Axis("token", 0, tokens, 1, 4))
    page = Page(4 * tokens, (Field("k", "float32", 4, 0, axes, (("head", 1), ("token", tokens))),))
    group = Group(0, "full", tokens, (Layer("layer.0", page, region=0, offset=0, stride=4 * tokens),))
    return encode_worker(WorkerGeometry(Rank(), 1, (Region(0, 4 * tokens),), (group,)))


def test_engines_that_fit_have_no_factors_and_others_have_those_that_fail() -> None:
    process.rehearse()
    assert compared(card("d"), card("p"), CompareSides()).bad == ()
    (factor,) = compared(card("d", model="a"), card("p", model="b"), CompareSides()).bad
    assert (factor.name, factor.local, factor.remote) == ("model", "a", "b")


def test_a_shape_knows_neither_id_nor_address_and_all_else() -> None:
    def shape(peer: EngineCard) -> str:
        return compared(card("d"), peer, FindShape()).shape

    mine = worker(facts("p")).card
    moved = msgspec.structs.replace(
        mine, geometry=mine.geometry.replace(b"[65536,", b"[131072,"), metadata=b"x"
    )
    assert moved.geometry != mine.geometry
    same = {shape(card("p")), shape(card("q")), shape(card("p", mine)), shape(card("p", moved))}
    assert len(same) == 1
    other = msgspec.structs.replace(mine, backend="nixl")
    less = msgspec.structs.replace(mine, geometry=mine.geometry.replace(b'"num_blocks":8', b'"num_blocks":7'))
    others = {shape(card("p", other)), shape(card("p", less)), shape(card("p", model="b"))}
    assert len(others - same) == 3


@pytest.mark.parametrize(
    "geometry", [b"{}", worker(facts("p", tp=2), 1).card.geometry], ids=["none", "of rank 1"]
)
def test_a_card_that_cannot_be_read_is_a_factor_that_fails(geometry: bytes) -> None:
    spoilt = card("p", msgspec.structs.replace(worker(facts("p")).card, geometry=geometry))
    (factor,) = compared(card("d"), spoilt, FindShape()).bad
    assert not factor.ok
    assert "not readable" in factor.remote


def test_what_a_card_makes_up_does_not_make_a_long_refusal() -> None:
    refused = compared(card("d", model="a"), card("p", model="b" * 100_000), CompareSides())
    assert len(msgspec.msgpack.encode(refused)) < 2000


def test_a_geometry_that_nobody_can_plan_is_refused_with_figure_and_limit() -> None:
    hostile = card("p", msgspec.structs.replace(worker(facts("p")).card, geometry=demanding()))
    refusal = compared(card("d"), hostile, CompareSides()).refusal
    assert f"{1 << 26}; at most {1 << 24} are compared" in refusal
