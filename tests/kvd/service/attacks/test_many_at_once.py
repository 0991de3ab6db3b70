"""What happens to a great many leases or engines at one moment is spread over turns of the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvd.service.handlers import drains, queries
from kvd.service.sockets.router import Caller
from kvd.wire.drain import DrainEngines
from kvd.wire.query import ListEngines
from kvd.wire.registration import OpenLease
from tests.support.crowded_host import TURN_SECONDS, Host, host
from tests.support.daemons import facts

LEASES = 65_000
ENGINES = 5_000
Run = Callable[[Awaitable[Any]], Any]


def with_leases(here: Host) -> None:
    """One engine with nearly all leases that a user may have open, for ten minutes."""
    here.take(facts("e", role="prefill"), 0)
    owner = here.take(facts("e", role="prefill"))
    for number in range(0, LEASES, 1000):
        here.leases.open(owner, tuple(OpenLease(f"r{n}", 600.0) for n in range(number, number + 1000)))


async def turns(until: Callable[[], bool]) -> None:
    """Turns of the loop until that holds."""
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110 (it is the loop's turns that are looked at)
            await asyncio.sleep(0)


def test_leases_that_end_at_one_moment() -> None:
    """It took half a second, in one turn."""
    with host() as (here, run):

        async def fill() -> None:
            with_leases(here)

        async def end() -> None:
            """As a machine that stood still for these ten minutes sees it."""
            now = time.monotonic()
            for name in here.leases.table:
                here.leases._expiry.set(name, now)

        run(fill())
        assert here.leases.count("e") == LEASES
        run(end())
        assert run(here.measured(turns(lambda: not here.leases.table))) < 2 * TURN_SECONDS
        assert here.leases.count("e") == 0


def test_a_drain_that_closes_and_undoes_the_leases_of_one_engine() -> None:
    with host() as (here, run):

        async def fill() -> None:
            with_leases(here)

        run(fill())
        scheduler = here.registry.engines["e"].scheduler
        assert scheduler is not None
        kept = next(iter(here.leases.table.values()))
        kept.readers["other", "reader"] = time.monotonic() + 600.0

        async def drain() -> None:
            here.drains.begin(scheduler, 0.0)
            await turns(lambda: here.leases.count("e") == 1)
            assert kept.closed
            here.drains.end("e")
            await turns(lambda: not kept.closed)

        assert run(here.measured(drain())) < 2 * TURN_SECONDS
        here.leases.close()


def test_a_host_of_many_engines_is_drained_looked_at_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 4.7 s, in one turn."""

    async def answer(*_: Any) -> tuple[None, str]:
        await asyncio.sleep(0.01)
        return None, "asked"

    async def permitted(*_: Any) -> None:
        pass

    monkeypatch.setattr(drains, "_ask", answer)
    monkeypatch.setattr(drains, "refuse_no_operator", permitted)
    with host() as (here, run):

        async def fill() -> None:
            for number in range(ENGINES):
                here.take(facts(f"e{number:04}", role="prefill"), 0)
                here.take(facts(f"e{number:04}", role="prefill"))

        run(fill())

        async def order(action: str) -> None:
            message = DrainEngines(action=action, grace_seconds=0.0)  # type: ignore[arg-type]
            answer = await drains.drain_engines(here.daemon, Caller(b"", uid=0), message)
            assert len(answer.rows) == ENGINES
            assert {row.draining for row in answer.rows} == {action != "undo"}

        for action in ("begin", "look", "undo"):
            assert run(here.measured(order(action))) < 2 * TURN_SECONDS, action


def test_one_process_that_asks_for_a_thousand_pages_keeps_another_waiting_for_one() -> None:
    """It kept others waiting for over a minute."""
    with host() as (here, run):

        async def fill() -> None:
            for number in range(2_000):
                here.take(facts(f"e{number:04}", role="prefill"), 0)

        run(fill())
        answered: list[str] = []

        async def ask(name: str, pid: int, uid: int = 0) -> None:
            await queries.list_engines(here.daemon, Caller(b"", pid=pid, uid=uid), ListEngines())
            answered.append(name)

        async def all_at_once() -> None:
            greedy = [asyncio.create_task(ask("greedy", 1)) for _ in range(200)]
            await asyncio.sleep(0)
            others = [asyncio.create_task(ask("honest", 2)), asyncio.create_task(ask("another user's", 3, 4))]
            await asyncio.gather(*others)
            for task in greedy:
                task.cancel()
            await asyncio.gather(*greedy, return_exceptions=True)
            await ask("afterwards", 5)

        run(all_at_once())
        assert answered.index("honest") <= 4
        assert answered.index("another user's") <= 4
        assert answered[-1] == "afterwards"
