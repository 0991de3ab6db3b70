"""Processes that compare: kept, replaced and ended when they must be, and whose turn it is."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kvd.service.errors import RequestRefused
from kvd.service.peers.comparer import handle, pool
from kvd.service.peers.comparer.pool import MOST_PROCESSES, MOST_WAITING, SUSPECTS, ComparerPool, Whose
from kvd.wire.identity import Endpoint, EngineCard
from tests.support.daemons import facts, worker

THERE = Whose(Endpoint("there", 1))


def card(engine_id: str) -> EngineCard:
    engine = facts(engine_id)
    return EngineCard(engine=engine, generation="g", workers=(worker(engine).card,))


def test_a_process_compares_and_is_kept_and_ends_with_kvd() -> None:
    async def run() -> None:
        comparers = ComparerPool(Counter())
        try:
            for _ in range(2):
                async with comparers.turn(THERE) as process:
                    assert (await process.shape(card("p"))).shape
                    assert (await process.compare(card("d"))).bad == ()
            assert comparers._counters["handshakes.comparers_started"] == 1
        finally:
            await comparers.close()

    asyncio.run(run())


def test_a_process_that_takes_too_long_is_ended_and_its_peer_may_have_half_of_them_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "WALL_SECONDS", 0.2)

    async def run() -> None:
        comparers = ComparerPool(Counter())
        try:
            with pytest.raises(RequestRefused, match="by the clock") as refused:
                async with comparers.turn(THERE):
                    await asyncio.Event().wait()
            assert refused.value.code == "KVD-COMPARE-LIMIT"
            assert not comparers._all
        finally:
            await comparers.close()

    asyncio.run(run())


def pooled(talk: Callable[[ComparerPool], Awaitable[None]]) -> None:
    """Have a test talk to a pool of processes, which is closed after it."""

    async def run() -> None:
        comparers = ComparerPool(Counter())
        try:
            await talk(comparers)
        finally:
            await comparers.close()

    asyncio.run(run())


def test_a_process_that_ended_while_it_was_idle_is_replaced_and_no_peer_is_blamed() -> None:
    async def talk(comparers: ComparerPool) -> None:
        await comparers.start()
        comparers._idle[0]._process.terminate()
        comparers._idle[0]._process.wait()
        async with comparers.turn(THERE) as process:
            assert (await process.shape(card("p"))).shape
        assert (len(comparers._all), comparers._suspects) == (1, {})

    pooled(talk)


def test_a_process_that_is_ended_from_outside_at_work_makes_no_suspect() -> None:
    async def talk(comparers: ComparerPool) -> None:
        async def compare() -> None:
            async with comparers.turn(THERE) as process:
                cast("Any", process)._process.kill()
                await process.shape(card("p"))

        with pytest.raises(RequestRefused, match="ended from outside") as refused:
            await compare()
        assert (refused.value.code, comparers._suspects) == ("KVD-COMPARE-UNAVAILABLE", {})

    pooled(talk)


def test_a_process_that_cannot_be_started_is_kvds_fault_and_not_tried_at_each_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def full(*_given: object, **_more: object) -> None:
        tried.append(1)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def talk(comparers: ComparerPool) -> None:
        monkeypatch.setattr(subprocess, "Popen", full)
        for _ in range(3):
            with pytest.raises(RequestRefused, match="start the process") as refused:
                async with comparers.turn(THERE):
                    pass
            assert refused.value.code == "KVD-COMPARE-UNAVAILABLE"
        assert (len(tried), comparers._suspects) == (1, {})
        assert "Resource temporarily unavailable" in comparers.trouble

    pooled(talk)


def test_a_process_that_could_not_be_started_is_tried_again_though_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, tried = subprocess.Popen, []

    def full_twice(*given: Any, **more: Any) -> subprocess.Popen[bytes]:
        tried.append(1)
        if len(tried) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*given, **more)

    async def talk(comparers: ComparerPool) -> None:
        monkeypatch.setattr(subprocess, "Popen", full_twice)
        monkeypatch.setattr(pool, "AGAIN_SECONDS", 0.0)
        await comparers.start()
        assert comparers.trouble
        trying = asyncio.create_task(comparers.keep_trying())
        async with asyncio.timeout(30):
            while comparers.trouble:  # noqa: ASYNC110 - what it tries announces nothing
                await asyncio.sleep(0)
        trying.cancel()
        assert len(comparers._idle) == 1

    pooled(talk)
    assert caplog.text.count("no process to compare engines can be started") == 1, "it is told once"


def test_a_turn_that_is_cancelled_while_its_process_starts_leaves_none() -> None:
    async def talk(comparers: ComparerPool) -> None:
        async def compare() -> None:
            async with comparers.turn(THERE):
                pass

        task = asyncio.create_task(compare())
        while not comparers._all:  # noqa: ASYNC110 - the start of a process announces nothing
            await asyncio.sleep(0)
        (process,) = comparers._all
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not comparers._all
        assert process._process.returncode is not None

    pooled(talk)


def test_an_answer_longer_than_any_is_not_read_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(comparers: ComparerPool) -> None:
        await comparers.start()
        monkeypatch.setattr(handle, "ANSWER_BYTES", 1)
        with pytest.raises(RequestRefused) as refused:
            async with comparers.turn(THERE) as process:
                await process.shape(card("p"))
        assert (refused.value.code, comparers._all) == ("KVD-COMPARE-LIMIT", set())

    pooled(talk)


def test_turns_go_round_the_peers_and_suspects_leave_room() -> None:
    peers = [Whose(Endpoint(f"h{number}", 1)) for number in range(6)]

    async def run() -> None:
        comparers = ComparerPool(Counter())
        for suspect in peers[:3]:
            comparers._suspects[suspect] = float("inf")
        waiting = [asyncio.create_task(comparers._wait_for_turn(peer)) for peer in peers for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(comparers._running) == MOST_PROCESSES
        assert len(comparers._running & set(peers[:3])) == SUSPECTS
        assert comparers._running >= set(peers[3:5])
        comparers._free(peers[3])
        assert peers[5] in comparers._running, "who has had a turn comes after who has had none"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        comparers._running.clear()
        comparers._next()
        assert (comparers._waiting, comparers._running) == ({}, set())

    asyncio.run(run())


def test_one_user_of_this_host_whose_pairs_fill_a_line_leaves_anothers_pair_its_turn() -> None:
    async def run() -> None:
        comparers = ComparerPool(Counter())
        hostile, both, honest = (Whose(Endpoint(), frozenset(uids)) for uids in ((7,), (7, 8), (8,)))
        waiting = [
            asyncio.create_task(comparers._wait_for_turn(whose))
            for whose in (hostile, both)
            for _ in range(MOST_WAITING + 1)
        ]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="engines of this host, uid 7 are waiting"):
            await comparers._wait_for_turn(hostile)
        async with asyncio.timeout(5):
            await comparers._wait_for_turn(honest)
        assert comparers._running == {hostile, both, honest}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())


def test_one_user_whose_pairs_fill_the_line_of_another_kvd_leaves_anothers_pair_its_turn() -> None:
    async def run() -> None:
        comparers = ComparerPool(Counter())
        kvd = Endpoint("there", 1)
        hostile, honest = Whose(kvd, frozenset({7})), Whose(kvd, frozenset({8}))
        waiting = [asyncio.create_task(comparers._wait_for_turn(hostile)) for _ in range(MOST_WAITING + 1)]
        await asyncio.sleep(0)
        mine = asyncio.create_task(comparers._wait_for_turn(honest))
        await asyncio.sleep(0)
        assert comparers._running == {Whose(kvd)}
        assert not mine.done(), "another kvd has one turn at a time"
        comparers._free(hostile)
        await asyncio.sleep(0)
        assert mine.done()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())
