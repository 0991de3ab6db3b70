"""The shape that kvd makes of a small card is the one that the comparing process makes, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from kvd.geometry.alike import PlacedShape, ShapeReader
from kvd.service.peers.card_shape import DOCUMENT_BYTES, GEOMETRY_BYTES, CardShapes
from kvd.service.peers.comparer import process
from kvd.service.peers.comparer.messages import FindShape
from kvd.wire.card_parts import part_from
from kvd.wire.identity import EngineCard, WorkerCard
from tests.support.daemons import facts, worker


def card(*spoilt: Callable[[WorkerCard], WorkerCard], tp: int = 2) -> EngineCard:
    """An engine's card; each of its last workers is spoilt by one of the functions."""
    engine = facts("p", tp=tp)
    workers = [worker(engine, rank).card for rank in range(tp)]
    for at, spoil in enumerate(spoilt, tp - len(spoilt)):
        workers[at] = spoil(workers[at])
    return EngineCard(engine=engine, generation="g", workers=tuple(workers))


def with_geometry(geometry: bytes) -> Callable[[WorkerCard], WorkerCard]:
    return lambda it: msgspec.structs.replace(it, geometry=geometry)


def found(peer: EngineCard) -> str:
    return asyncio.run(CardShapes().find(peer, "there"))


def by_the_process(peer: EngineCard) -> str:
    side = process._SideRead(peer)
    side.parts.add(peer.engine, part_from(peer, 0))
    return process.found(FindShape(), {False: side}).shape


def test_it_is_the_shape_that_the_process_makes() -> None:
    assert found(card()) == by_the_process(card()) != ""
    other = card(lambda it: msgspec.structs.replace(it, backend="nixl"))
    assert found(other) == by_the_process(other) != found(card())


@pytest.mark.parametrize(
    "geometry",
    [
        b"{}",
        b"",
        worker(facts("p", tp=2), 0).card.geometry,  # of the other rank
        worker(facts("p", tp=2), 1).card.geometry.replace(b'"rank":[1', b'"rank":[-1'),
        worker(facts("p", tp=2), 1).card.geometry + b"{",
    ],
)
def test_a_geometry_that_is_not_plain_is_left_to_the_process(geometry: bytes) -> None:
    assert found(card(with_geometry(geometry))) == ""


def test_a_card_that_is_not_small_is_left_to_the_process() -> None:
    spaces = DOCUMENT_BYTES - len(card().workers[1].geometry)
    plain = card().workers[1].geometry
    assert found(card(with_geometry(plain + spaces * b" ")))
    assert found(card(with_geometry(plain + (spaces + 1) * b" "))) == ""
    tp = GEOMETRY_BYTES // DOCUMENT_BYTES + 1
    wide = [
        with_geometry(worker(facts("p", tp=tp), rank).card.geometry.ljust(DOCUMENT_BYTES))
        for rank in range(tp)
    ]
    assert found(card(*wide, tp=tp)) == ""
    assert found(card(*wide[2:], tp=tp)) != ""


def test_of_many_that_arrive_together_one_is_read_each_turn_and_a_long_one_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.service.slices.SLICE_SECONDS", 0.0)
    read_in: list[int] = []
    turn = 0

    async def run() -> None:
        nonlocal turn
        shapes = CardShapes()
        tasks = [asyncio.create_task(shapes.find(card(tp=3), "there")) for _ in range(4)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1

    class Seen(ShapeReader):
        def read(self, head: bytes, tail: bytes) -> PlacedShape | None:
            read_in.append(turn)
            return super().read(head, tail)

    monkeypatch.setattr("kvd.service.peers.card_shape.ShapeReader", Seen)
    asyncio.run(run())
    assert len(read_in) == 12
    assert len(set(read_in)) == 12, "no turn of the loop reads two"


def test_whoever_has_many_cards_keeps_nobody_else_waiting_and_those_who_leave_keep_no_turn() -> None:
    async def run() -> None:
        shapes, done = CardShapes(), list[str]()

        async def find(whose: str) -> None:
            await shapes.find(card(), whose)
            done.append(whose)

        many = [asyncio.create_task(find("hostile")) for _ in range(20)]
        await asyncio.sleep(0)
        for left in many[1:5]:
            left.cancel()
        await find("honest")
        assert done.count("hostile") <= 2
        await asyncio.gather(*many, return_exceptions=True)
        assert done.count("hostile") == 16
        async with asyncio.timeout(5):
            await find("another")

    asyncio.run(run())
