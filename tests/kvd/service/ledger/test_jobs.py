"""Fair shares of what waits for the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvd.service.errors import RequestRefused
from kvd.service.ledger.jobs import JobQueue, LedgerClient, LedgerJob


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def job(loop: asyncio.AbstractEventLoop, route: bytes, uid: int = 1, size: int = 10) -> LedgerJob:
    return LedgerJob(lambda _: None, loop.create_future(), LedgerClient(route, uid), size)


def queue(jobs: int = 100) -> JobQueue:
    return JobQueue("reports", jobs, 2 * jobs)


def test_clients_of_a_user_take_turns(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue()
    for route in (b"a", b"a", b"a", b"b", b"c"):
        waiting.put(job(loop, route))
    assert [j.client.route for j in waiting.take(10, 1000, 0)] == [b"a", b"b", b"c", b"a", b"a"]
    assert waiting.take(10, 1000, 0) == []


def test_users_take_turns_however_many_clients_they_have(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue()
    for n in range(50):
        waiting.put(job(loop, b"%d" % n, uid=1))
    waiting.put(job(loop, b"honest", uid=2))
    assert b"honest" in [j.client.route for j in waiting.take(2, 1000, 0)]


def test_a_batch_is_bounded_in_jobs_and_bytes(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue()
    for n in range(20):
        waiting.put(job(loop, b"%d" % n))
    assert len(waiting.take(5, 1000, 0)) == 5
    assert len(waiting.take(100, 50, 0)) == 5


def test_who_has_too_much_waiting_is_refused_and_nobody_else(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue(jobs=3)
    for _ in range(3):
        waiting.put(job(loop, b"a"))
    with pytest.raises(
        RequestRefused, match=r"^3 reports of this client wait already, at most 3 may$"
    ) as refused:
        waiting.put(job(loop, b"a"))
    assert (refused.value.code, refused.value.final) == ("KVD-BUSY", False)
    waiting.put(job(loop, b"b"))
    waiting.take(1, 1000, 0)
    waiting.put(job(loop, b"a"))


def test_a_user_with_many_clients_has_a_share_as_well(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue(jobs=3)
    for n in range(6):
        waiting.put(job(loop, b"%d" % n))
    with pytest.raises(RequestRefused, match="of this user"):
        waiting.put(job(loop, b"another"))
    waiting.put(job(loop, b"another", uid=2))


def test_a_job_that_is_large_alone_is_taken(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue()
    waiting.put(job(loop, b"a", size=10**9))
    assert len(waiting.take(1, 1, 0)) == 1


def test_shares_are_given_back(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue(jobs=3)
    for _ in range(100):
        for route in (b"a", b"b"):
            for _ in range(3):
                waiting.put(job(loop, route))
        assert len(waiting.take(10, 1000, 0)) == 6
    assert (waiting._budget.counts.of, waiting.over) == ({}, False)
    waiting.close()
    assert waiting.over


def test_what_is_urgent_comes_first(loop: asyncio.AbstractEventLoop) -> None:
    waiting = queue()
    waiting.put(job(loop, b"a"))
    waiting.put_first(job(loop, b"kvd"))
    assert [j.client.route for j in waiting.take(10, 1000, 0)] == [b"kvd", b"a"]
    waiting.put_first(job(loop, b"kvd"))
    assert len(waiting.take_urgent()) == 1
