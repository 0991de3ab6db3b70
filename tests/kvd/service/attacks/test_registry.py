"""Registrations in amounts, and of processes that have ended: the registry holds no turn of the loop for long."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import zmq

from kvd.service.engines import registry as registry_module
from kvd.service.handlers import outcomes, queries
from kvd.service.sockets.router import Caller
from kvd.wire.frame import decode, encode
from kvd.wire.outcomes import GetOutcomes, OutcomeCount, ReportOutcomes
from kvd.wire.query import ListEngines, ListWorkers
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Refused
from tests.support.attacked import assert_unfelled, attack, attacked, attacking
from tests.support.crowded_host import TURN_SECONDS, Host, host
from tests.support.daemons import Daemon, daemons, facts, wait_for, worker

LARGE = 16_000
"""Workers of an engine, nearly as many as one user may have."""

HERE = Caller(b"")


# --- real processes ---


def register(directory: Path, count: int, incarnation: str = "", stay: float = 0.0) -> Counter[str]:
    """Register so many engines of one worker each over one connection; what was answered."""
    answers: Counter[str] = Counter()
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger = 0
        sender.connect(f"ipc://{directory}/kvd.sock")
        sent = 0
        while answers.total() < count:
            while sent < count and sent - answers.total() < 100:
                sent += 1
                card = worker(facts(f"x{os.getpid()}-{sent}", role="prefill"), 0, incarnation)
                sender.send(encode(card, sent))
            message, of = decode(sender.recv())
            if of:
                answers[message.code if isinstance(message, Refused) else type(message).__name__] += 1
        time.sleep(stay)
    return answers


def register_for(directory: Path, seconds: float) -> None:
    """Register engines as fast as they are taken."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        register(directory, 200)


def states(kvd: Daemon) -> Counter[str]:
    return Counter(row.state for row in kvd.engines().values())


def test_an_incarnation_is_one_client_and_ends_with_its_process() -> None:
    """299 engines of one incarnation whose process is gone were ready for ever."""
    with daemons() as (kvd,):
        with attacking(register, kvd.directory, 299, uuid4().hex, 60.0):
            wait_for(lambda: kvd.status().counters.get("refused.KVD-BAD-CARD") == 298)
            assert states(kvd) == {"ready": 1}
        wait_for(lambda: states(kvd) == {"gone": 1}, 5.0)


def test_all_engines_of_a_process_are_gone_as_soon_as_it_is() -> None:
    with daemons() as (kvd,), attacked(kvd) as watch:
        with attacking(register, kvd.directory, 299, "", 60.0):
            wait_for(lambda: states(kvd)["ready"] == 299)
        wait_for(lambda: states(kvd) == {"gone": 299}, 5.0)
    assert_unfelled(watch.verdict())


def test_registrations_as_fast_as_they_are_taken() -> None:
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            attack(register_for, kvd.directory, 2.0, seconds=10.0)
        assert_unfelled(watch.verdict())
        wait_for(lambda: states(kvd)["ready"] == 0, 5.0)


# --- a host with all that may be, in this process, so that its turns are measured and nothing else ---


async def every_page(ask: Callable[[str], Awaitable[Any]]) -> int:
    """Ask on until there are no more rows; how many there were."""
    rows, after = 0, ""
    while True:
        answer = await ask(after)
        rows += len(answer.rows)
        if not (after := answer.more):
            return rows


def test_two_thousand_engines_with_twenty_thousand_leases_are_listed_in_short_turns() -> None:
    """It took 10.5 s, in one turn."""
    with host() as (here, run):

        async def fill() -> None:
            for number in range(2000):
                engine = facts(f"e{number:04}", role="prefill")
                here.take(engine, 0)
                owner = here.take(engine)
                here.leases.open(owner, tuple(OpenLease(f"r{n}", 600.0) for n in range(10)))

        async def ask(after: str) -> Any:
            return await queries.list_engines(here.daemon, HERE, ListEngines(cards=True, after=after))

        run(fill())
        began = time.thread_time()
        longest = run(here.measured(every_page(ask)))
        assert time.thread_time() - began < 1.0
        assert longest < TURN_SECONDS
        assert run(every_page(ask)) == 2000
        assert here.leases.count("e0000") == 10
        here.leases.close()


@pytest.fixture(scope="module")
def crowd() -> Iterator[tuple[Host, Callable[[Awaitable[Any]], Any]]]:
    """10,000 registrations: 9,000 engines of one worker, and one of 999 workers with its scheduler."""
    with host() as (here, run):

        async def fill() -> None:
            for number in range(9000):
                here.take(facts(f"e{number:04}", role="prefill"), 0)
            large = facts("large", tp=999)
            for rank in range(999):
                here.take(large, rank)
            owner = here.take(large)
            counts = tuple(OutcomeCount("loaded", f"C{n}", 1, 1) for n in range(4))
            for number in range(500):
                report = ReportOutcomes(engine_id=f"e{number:04}", totals=counts)
                here.outcomes.report(owner.incarnation, report, time.monotonic(), 0)

        run(fill())
        yield here, run


QUESTIONS: dict[str, tuple[int, Callable[[Host, str], Awaitable[Any]]]] = {
    "engines": (
        9001,
        lambda here, after: queries.list_engines(here.daemon, HERE, ListEngines(after=after)),
    ),
    "workers": (
        10_000,
        lambda here, after: queries.list_workers(here.daemon, HERE, ListWorkers(after=after)),
    ),
    "outcomes": (
        9001,
        lambda here, after: outcomes.get_outcomes(here.daemon, HERE, GetOutcomes(after=after)),
    ),
}


@pytest.mark.parametrize("what", QUESTIONS)
def test_ten_thousand_registrations_are_listed_in_short_turns(
    crowd: tuple[Host, Callable[[Awaitable[Any]], Any]], what: str
) -> None:
    here, run = crowd
    count, ask = QUESTIONS[what]

    async def four_at_a_time() -> None:
        found = await asyncio.gather(*(every_page(lambda after: ask(here, after)) for _ in range(4)))
        assert found == [count] * 4

    assert run(here.measured(four_at_a_time())) < TURN_SECONDS


def test_metrics_tell_of_a_bounded_number_of_engines(
    crowd: tuple[Host, Callable[[Awaitable[Any]], Any]],
) -> None:
    here, run = crowd
    assert len(run(outcomes.totals(here.daemon))) == outcomes.MOST_TOLD
    assert run(here.measured(outcomes.totals(here.daemon))) < TURN_SECONDS


def test_ten_thousand_that_fall_silent_and_end_do_so_in_short_turns(
    crowd: tuple[Host, Callable[[Awaitable[Any]], Any]],
) -> None:
    """The last of these tests: nobody lives afterwards."""
    here, run = crowd
    tick = here.liveness.tick
    assert run(here.measured(tick(time.monotonic()))) < TURN_SECONDS / 4
    here.liveness._ticked = time.monotonic() + 1e6  # it was not late

    async def silent() -> None:
        await tick(time.monotonic() + 2.0)

    assert run(here.measured(silent())) < TURN_SECONDS
    assert here.registry.roster.counts["workers.silent"] == 9999

    async def end() -> None:
        here.liveness._end_soon(list(here.registry.clients), 1 << 22)
        while here.registry.roster.living_of.total:  # noqa: ASYNC110 (its turns are looked at)
            await asyncio.sleep(0)

    assert run(here.measured(end())) < TURN_SECONDS
    assert here.registry.counts["engines.gone"] == 9001

    async def forget() -> None:
        here.registry.forget(0.0)

    run(forget())
    assert len(here.registry.engines) == registry_module.MOST_GONE_OF_UID


def test_workers_of_a_large_engine_are_replaced_each_in_a_short_turn() -> None:
    """Each sorted all workers, and their incarnations, anew: 16,000 of them took 32 ms."""
    with host() as (here, run):
        engine = facts("large", tp=LARGE)

        async def fill() -> None:
            for rank in range(LARGE):
                here.take(engine, rank)

        async def replace() -> None:
            for rank in (0, LARGE // 2, LARGE - 1):
                await asyncio.sleep(0)
                here.take(engine, rank)

        run(fill())
        generations = {here.registry.engines["large"].generation}
        turns = []
        for _ in range(3):
            turns.append(run(here.measured(replace())))
            generations.add(here.registry.engines["large"].generation)
        assert len(generations) == 4
        assert min(turns) < TURN_SECONDS, turns
        ranks = here.registry.engines["large"].ranks
        assert [rank.tp for rank in ranks] == list(range(LARGE))
        here.leases.close()
