"""A lease that has ended never opens again, whatever was sent before its end and comes after it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import uuid4

import pytest

from kvd.service.config import LeaseSettings
from kvd.service.engines import ended_leases as module
from kvd.service.engines.claimant import Claimant
from kvd.service.engines.ended_leases import EndedLease, EndedLeases
from kvd.service.engines.leases import LeaseTable
from kvd.service.engines.local_engine import Client
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.sockets.events import Events
from kvd.vllm.scheduler.leases import Leases
from kvd.wire.frame import Message
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import (
    LeaseClaim,
    LeaseClaimed,
    LeaseClosed,
    LeaseEnded,
    LeaseExtend,
    LeaseOpened,
    LeaseRelease,
)
from kvd.wire.registration import OpenLease
from tests.support.daemons import daemons, facts, scheduler, session
from tests.support.lender import Lender

KEY = LeaseKey(engine_id="p", request_id="r")
READER = Claimant("a decoder")
FIRST = OpenLease("r", 60.0, 3, opening=1)


def owner(incarnation: str = "first", uid: int = 0) -> Client:
    return Client(kind="scheduler", engine=facts("p"), incarnation=incarnation, pid=1, route=b"r", uid=uid)


@dataclass
class Table:
    """A table whose owner holds nothing any more; ``told`` is what it heard."""

    told: list[LeaseEnded] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    counters: Counter[str] = field(default_factory=Counter)
    leases: LeaseTable = field(init=False)

    def __post_init__(self) -> None:
        events = Events(None, self.counters)
        self.leases = LeaseTable(LeaseSettings(), events, OutcomeCounts(), self.hear, self.asked)

    def hear(self, _route: bytes, message: Message) -> None:
        assert isinstance(message, LeaseEnded)
        self.told.append(message)
        self.ended.set()

    async def asked(self, _route: bytes, message: Message, _seconds: float) -> Message:
        assert isinstance(message, LeaseExtend)
        assert message.opening == 1
        return LeaseClaimed(request_id="r", seconds=0.0, reason="the lease has ended")

    async def claim(self, extend: float = 0.0) -> LeaseClaimed:
        return await self.leases.claim(LeaseClaim(key=KEY, reader="one", extend_seconds=extend), READER)


async def released(table: Table) -> None:
    table.leases.open(owner(), (FIRST,))
    await table.claim()
    table.leases.release(LeaseRelease(key=KEY, reader="one"), READER)


async def expired(table: Table) -> None:
    table.leases.open(owner(), (OpenLease("r", 0.01, 3, opening=1),))
    await table.ended.wait()


async def closed(table: Table) -> None:
    table.leases.open(owner(), (FIRST,))
    table.leases.closed(LeaseClosed(engine_id="p", request_id="r", end="expired"))


async def not_extended(table: Table) -> None:
    table.leases.open(owner(), (FIRST,))
    assert (await table.claim(extend=100.0)).seconds == 0


def run(work: Callable[[Table], Awaitable[None]]) -> None:
    async def with_table() -> None:
        table = Table()
        await work(table)
        table.leases.close()

    asyncio.run(with_table())


@pytest.mark.parametrize("end", [released, expired, closed, not_extended])
@pytest.mark.parametrize("opening", [LeaseTable.open, LeaseTable.open_held])
def test_an_opening_that_comes_after_the_end_opens_nothing(
    end: Callable[[Table], Awaitable[None]],
    opening: Callable[[LeaseTable, Client, tuple[OpenLease, ...]], None],
) -> None:
    """Its owner has freed the blocks: who claimed that lease would read what other requests write there."""

    async def work(table: Table) -> None:
        await end(table)
        table.told.clear()
        opening(table.leases, owner(), (FIRST,))
        assert not table.leases.table
        assert table.leases.count("p") == 0
        assert [one.opening for one in table.told] == [1], "the owner is told again"
        claimed = await table.claim()
        assert (claimed.seconds, claimed.ended) == (0.0, True)
        assert table.counters["leases.openings_late"] == 1

    run(work)


def test_another_opening_of_that_request_id_is_another_lease() -> None:
    async def work(table: Table) -> None:
        await released(table)
        table.leases.open(owner(), (OpenLease("r", 60.0, 3, opening=2),))
        assert (await table.claim()).seconds > 0
        table.leases.release(LeaseRelease(key=KEY, reader="one"), READER)
        assert [one.opening for one in table.told] == [1, 2]

    run(work)


def test_what_an_owner_says_late_of_an_opening_closes_no_later_one() -> None:
    async def work(table: Table) -> None:
        table.leases.open(owner(), (OpenLease("r", 60.0, 3, opening=2),))
        table.leases.closed(LeaseClosed(engine_id="p", request_id="r", end="expired", opening=1))
        assert (await table.claim()).seconds > 0, "the blocks of the second are still kept"
        table.leases.closed(LeaseClosed(engine_id="p", request_id="r", end="expired", opening=2))
        assert not table.leases.table

    run(work)


def test_what_an_engine_before_had_ended_is_nothing_to_the_next_one() -> None:
    async def work(table: Table) -> None:
        await released(table)
        table.leases.present(owner("second"), (FIRST,))
        assert (await table.claim()).seconds > 0

    run(work)


def test_an_end_that_its_owner_hears_late_is_not_that_of_its_next_lease() -> None:
    leases = Leases(grace=5.0)
    leases.open("r", 30.0, 3, 100.0)
    leases.on_message(LeaseEnded(request_id="r", end="released", opening=1), 101.0)
    assert leases.take_freed(101.0, lambda _: None) == ["r"]
    leases.open("r", 30.0, 3, 102.0)
    leases.on_message(LeaseEnded(request_id="r", end="released", opening=1), 102.0)
    assert leases.take_freed(102.0, lambda _: None) == []
    refused = leases.on_message(LeaseExtend(request_id="r", seconds=60.0, opening=1), 102.0)
    assert isinstance(refused, LeaseClaimed)
    assert refused.seconds == 0
    (second,) = leases.held(102.0)
    assert (second.seconds, second.opening) == (30.0, 2)


def test_between_real_processes_a_lease_is_open_once() -> None:
    with daemons() as (kvd,), Lender(kvd) as prefiller, session(kvd, scheduler(facts("d"))) as decoder:
        key = prefiller.open("r")
        (sent_before,) = prefiller.leases.held(0.0)
        release = LeaseRelease(key=key, reader="one")
        decoder.call(LeaseClaim(key=key, reader="one"), 10).result(10)
        decoder.call(release, 10).result(10)
        assert prefiller.wait_ended() == [("r", "released")]
        prefiller.session.call(LeaseOpened(engine_id="p", leases=(sent_before,)), 10).result(10)
        assert prefiller.holds() == 0
        claimed = decoder.call(LeaseClaim(key=key, reader="two"), 10).result(10)
        assert isinstance(claimed, LeaseClaimed)
        assert (claimed.seconds, claimed.ended) == (0.0, True)
        assert prefiller.leases.take_freed(0.0, lambda _: None) == ["r"]
        prefiller.open("r")
        assert prefiller.holds() == 1


def test_so_many_ends_of_a_user_are_remembered_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDED_KEPT", 100)
    ended = EndedLeases()

    def add(name: str, uid: int, at: float) -> None:
        ended.add(("p", name), EndedLease(uuid4().hex, 1, uid, "released", at))

    now = time.monotonic()
    add("another user's", 1001, now)
    for number in range(150):
        add(str(number), 1002, now)
    assert [n for n in range(150) if ended.get(("p", str(n)))] == list(range(50, 150))
    assert ended.get(("p", "another user's")), "it was there before all of these"
    monkeypatch.setattr(module, "ENDED_KEPT_SECONDS", 0.0)
    assert not ended.get(("p", "149"))
    assert not ended._all
    assert not ended._of


def test_so_many_bytes_of_a_users_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number alone 10,000 names of 512 wide characters took 20 MiB of each user."""
    monkeypatch.setattr(module, "ENDED_KEPT_BYTES", 64 << 10)
    ended = EndedLeases()
    ended.add(("p", "another user's"), EndedLease(uuid4().hex, 1, 1001, "released", time.monotonic()))
    names = [("p", str(number) + "\N{GRINNING FACE}" * 500) for number in range(100)]
    for name in names:
        ended.add(name, EndedLease(uuid4().hex, 1, 1002, "released", time.monotonic()))
    kept = [name for name in names if ended.get(name)]
    assert 25 < len(kept) < 33
    assert kept == names[-len(kept) :], "the oldest go first"
    assert ended.get(("p", "another user's"))
    for name in kept:
        name[1].encode()  # which makes Python keep the bytes too, so that the text takes more than before
        ended.discard(name)
    assert ended._bytes_of.of.keys() == {1001}
