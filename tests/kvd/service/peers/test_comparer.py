"""What the process that compares engines makes of cards; and the processes themselves, which end when they must."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from kvd.client.card_parts import part_from
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.errors import RequestRefused
from kvd.service.peers import comparer, comparing
from kvd.service.peers.comparer import found, rehearse
from kvd.service.peers.comparer_messages import CompareSides, FindShape, Found
from kvd.service.peers.comparing import MOST_PROCESSES, SUSPECTS, Comparing
from kvd.wire.identity import Endpoint, EngineCard, WorkerCard
from tests.support.daemons import facts, worker

THERE = Endpoint("there", 1)


def card(engine_id: str, *workers: WorkerCard, model: str = "tiny") -> EngineCard:
    engine = facts(engine_id, tp=max(1, len(workers)), model=model)
    return EngineCard(engine=engine, generation="g", workers=workers or (worker(engine).card,))


def compared(local: EngineCard, peer: EngineCard, job: FindShape | CompareSides) -> Found:
    sides = {}
    for number, side in enumerate((peer, local)):
        sides[bool(number)] = comparer._SideRead(side)
        sides[bool(number)].parts.add(side.engine, part_from(side, 0))
    return found(job, sides)


def demanding() -> bytes:
    """A geometry that is consistent with itself and that nobody can plan: a head of 2 ** 26 tokens."""
    tokens = 1 << 26
    axes = (Axis("head", 0, 1, 1, 4), Axis("token", 0, tokens, 1, 4))
    page = Page(4 * tokens, (Field("k", "float32", 4, 0, axes, (("head", 1), ("token", tokens))),))
    group = Group(0, "full", tokens, (Layer("layer.0", page, region=0, offset=0, stride=4 * tokens),))
    return encode_worker(WorkerGeometry(Rank(), 1, (Region(0, 4 * tokens),), (group,)))


def test_engines_that_fit_have_no_factors_and_others_have_those_that_fail() -> None:
    rehearse()
    assert compared(card("d"), card("p"), CompareSides()) == Found()
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


def test_a_process_compares_and_is_kept_and_ends_with_kvd() -> None:
    async def run() -> None:
        pool = Comparing(Counter())
        try:
            for _ in range(2):
                async with pool.turn(THERE) as process:
                    assert (await process.shape(card("p"))).shape
                    assert await process.bad(card("d")) == ()
            assert pool._counters["handshakes.comparers_started"] == 1
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_process_that_takes_too_long_is_ended_and_its_peer_may_have_half_of_them_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "WALL_SECONDS", 0.2)

    async def run() -> None:
        pool = Comparing(Counter())
        try:
            with pytest.raises(RequestRefused, match="by the clock") as refused:
                async with pool.turn(THERE):
                    await asyncio.Event().wait()
            assert refused.value.code == "KVD-COMPARE-LIMIT"
            assert not pool._all
        finally:
            await pool.close()

    asyncio.run(run())


def pooled(talk: Callable[[Comparing], Awaitable[None]]) -> None:
    """Have a test talk to a pool of processes, which is closed after it."""

    async def run() -> None:
        pool = Comparing(Counter())
        try:
            await talk(pool)
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_process_that_ended_while_it_was_idle_is_replaced_and_no_peer_is_blamed() -> None:
    async def talk(pool: Comparing) -> None:
        await pool.start()
        pool._idle[0]._process.terminate()
        pool._idle[0]._process.wait()
        async with pool.turn(THERE) as process:
            assert (await process.shape(card("p"))).shape
        assert (len(pool._all), pool._suspects) == (1, {})

    pooled(talk)


def test_a_process_that_is_ended_from_outside_at_work_makes_no_suspect() -> None:
    async def talk(pool: Comparing) -> None:
        async def compare() -> None:
            async with pool.turn(THERE) as process:
                cast("Any", process)._process.kill()
                await process.shape(card("p"))

        with pytest.raises(RequestRefused, match="ended from outside") as refused:
            await compare()
        assert (refused.value.code, pool._suspects) == ("KVD-COMPARE-UNAVAILABLE", {})

    pooled(talk)


def test_a_process_that_cannot_be_started_is_kvds_fault_and_not_tried_at_each_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def full(*_given: object, **_more: object) -> None:
        tried.append(1)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def talk(pool: Comparing) -> None:
        monkeypatch.setattr(subprocess, "Popen", full)
        for _ in range(3):
            with pytest.raises(RequestRefused, match="start the process") as refused:
                async with pool.turn(THERE):
                    pass
            assert refused.value.code == "KVD-COMPARE-UNAVAILABLE"
        assert (len(tried), pool._suspects) == (1, {})

    pooled(talk)


def test_a_turn_that_is_cancelled_while_its_process_starts_leaves_none() -> None:
    async def talk(pool: Comparing) -> None:
        async def compare() -> None:
            async with pool.turn(THERE):
                pass

        task = asyncio.create_task(compare())
        while not pool._all:  # noqa: ASYNC110 - the start of a process announces nothing
            await asyncio.sleep(0)
        (process,) = pool._all
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pool._all
        assert process._process.returncode is not None

    pooled(talk)


def test_an_answer_longer_than_any_is_not_read_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(pool: Comparing) -> None:
        await pool.start()
        monkeypatch.setattr(comparing, "ANSWER_BYTES", 1)
        with pytest.raises(RequestRefused) as refused:
            async with pool.turn(THERE) as process:
                await process.shape(card("p"))
        assert (refused.value.code, pool._all) == ("KVD-COMPARE-LIMIT", set())

    pooled(talk)


def test_turns_go_round_the_peers_and_suspects_leave_room() -> None:
    peers = [Endpoint(f"h{number}", 1) for number in range(6)]

    async def run() -> None:
        pool = Comparing(Counter())
        for suspect in peers[:3]:
            pool._suspects[suspect] = float("inf")
        waiting = [asyncio.create_task(pool._wait_for_turn(peer)) for peer in peers for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(pool._running) == MOST_PROCESSES
        assert len(pool._running & set(peers[:3])) == SUSPECTS
        assert pool._running >= set(peers[3:5])
        pool._free(peers[3])
        assert peers[5] in pool._running, "who has had a turn comes after who has had none"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        pool._running.clear()
        pool._next()
        assert (pool._waiting, pool._running) == ({}, set())

    asyncio.run(run())
