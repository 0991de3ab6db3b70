"""The lease table alone: whose a reader is, what a claimant may ask for, and what may end a lease."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.service.config import LeaseSettings
from kvd.service.engines import leases as module
from kvd.service.engines.claimant import Claimant, host_claimant
from kvd.service.engines.lease_entry import MAX_READERS, MAX_READERS_OF_ONE
from kvd.service.engines.leases import LeaseTable
from kvd.service.engines.local_engine import Client
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.errors import RequestRefused
from kvd.service.sockets.events import Events
from kvd.wire.frame import Message
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseClosed, LeaseEnded, LeaseExtend, LeaseRelease
from kvd.wire.registration import OpenLease
from tests.support.daemons import facts

KEY = LeaseKey(engine_id="p", request_id="r")
HOSTS = (b"A" * 40, b"B" * 40, b"C" * 40)


@dataclass
class Table:
    """A table whose owner confirms whatever it is asked for."""

    settings: LeaseSettings
    ended: list[str] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    leases: LeaseTable = field(init=False)

    def __post_init__(self) -> None:
        self.leases = LeaseTable(
            self.settings, Events(None, Counter()), OutcomeCounts(), self.told, self.confirmed
        )

    def told(self, _route: bytes, message: Message) -> None:
        assert isinstance(message, LeaseEnded)
        self.ended.append(message.end)
        self.heard.set()

    async def confirmed(self, _route: bytes, message: Message, _seconds: float) -> Message:
        assert isinstance(message, LeaseExtend)
        self.asked.append(message.seconds)
        return LeaseClaimed(request_id=message.request_id, seconds=message.seconds)

    async def claim(self, claimant: Claimant, reader: str, extend: float = 0.0) -> LeaseClaimed:
        return await self.leases.claim(LeaseClaim(key=KEY, reader=reader, extend_seconds=extend), claimant)

    def release(self, claimant: Claimant, reader: str) -> None:
        self.leases.release(LeaseRelease(key=KEY, reader=reader), claimant)


def owner(name: str = "p") -> Client:
    return Client(kind="scheduler", engine=facts(name), incarnation=name, pid=1, route=b"r")


def run(work: Callable[[Table], Awaitable[None]], **settings_of: float) -> None:
    async def with_table() -> None:
        table = Table(LeaseSettings(**settings_of))
        table.leases.open(owner(), (OpenLease("r", 60.0),))
        await work(table)
        table.leases.close()
        assert table.leases.readers == 0
        assert not table.leases._held.of

    asyncio.run(with_table())


def host(number: int, *, knows: bool = True) -> Claimant:
    return host_claimant(HOSTS[number], knows=knows)


def test_nobody_releases_or_renews_the_reader_of_another_host() -> None:
    async def work(table: Table) -> None:
        assert (await table.claim(host(0), "one")).seconds > 0
        table.release(host(1), "one")
        table.release(Claimant("a local client"), "one")
        assert not table.ended
        assert (await table.claim(host(0), "one", 90.0)).seconds > 80, "what another released is not mine"
        table.release(host(0), "one")
        assert table.ended == ["released"]

    run(work)


def test_a_release_whose_claim_was_lost_ends_what_nobody_reads_if_its_host_knows_the_engine() -> None:
    async def work(table: Table) -> None:
        table.release(host(1, knows=False), "one")
        assert not table.ended
        assert (await table.claim(host(0), "two")).seconds > 0, "a stranger's word is not the last one"
        table.release(host(0), "two")
        assert table.ended == ["released"]

    run(work)

    async def known(table: Table) -> None:
        table.release(host(1), "one")
        assert table.ended == ["released"]

    run(known)


def test_a_host_asks_for_no_more_than_decoders_do_and_an_engine_here_for_more() -> None:
    async def work(table: Table) -> None:
        assert (await table.claim(host(0), "one", 1e9)).seconds == pytest.approx(120.0, abs=1.0)
        assert table.asked.pop() == pytest.approx(120.1)
        assert (await table.claim(Claimant("local"), "two", 1e9)).seconds > 3000
        assert (await table.claim(host(0), "one", float("nan"))).seconds > 3000, "that is the other's"

    run(work)


def test_a_stranger_of_another_user_keeps_nothing_longer_than_its_owner_does_unasked() -> None:
    stranger = Claimant("another user's", peer=True, knows=False, stranger=True)

    async def work(table: Table) -> None:
        claimed = await table.claim(stranger, "x", 3600.0)
        assert claimed.seconds == pytest.approx(60.0, abs=1.0)
        assert "not given the card of 'p'" in claimed.reason
        assert not table.asked
        assert (await table.claim(Claimant("a decoder"), "d", 100.0)).seconds > 99
        assert (await table.claim(stranger, "x", 3600.0)).seconds < 61, "nor for what another has asked"
        table.release(Claimant("a decoder"), "d")
        (lease,) = table.leases.table.values()
        assert lease.expires - time.monotonic() < 61
        given = Claimant("another user's", peer=True)
        assert (await table.claim(given, "x", 100.0)).seconds > 99, "it was given the card meanwhile"

    run(work)


def test_a_host_that_renews_for_ever_keeps_a_lease_for_the_longest_time_at_most() -> None:
    async def work(table: Table) -> None:
        (lease,) = table.leases.table.values()
        lease.opened -= 90.0
        assert (await table.claim(host(0), "one", 100.0)).seconds < 60.0
        assert not table.asked

    run(work, max_seconds=100.0)


def test_a_lease_has_only_so_many_readers_and_one_host_does_not_take_them_all() -> None:
    async def work(table: Table) -> None:
        for number in range(MAX_READERS_OF_ONE):
            assert (await table.claim(host(0), str(number))).seconds > 0
        full = await table.claim(host(0), "more")
        assert (full.seconds, f"had {MAX_READERS_OF_ONE} readers of one" in full.reason) == (0.0, True)
        for number in range(MAX_READERS - MAX_READERS_OF_ONE):
            assert (await table.claim(Claimant(f"client {number % 100}"), str(number))).seconds > 0
        assert f"had {MAX_READERS} readers" in (await table.claim(host(1), "more")).reason
        table.release(host(0), "0")
        assert (await table.claim(host(0), "1")).seconds > 0
        for number in range(10):
            table.release(host(1), f"stranger-{number}")
        (lease,) = table.leases.table.values()
        assert len(lease.readers) + len(lease.gone) == MAX_READERS, (
            "strangers' releases are not remembered then"
        )

    run(work)


def test_one_host_has_only_so_many_readers_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD", 3)

    async def work(table: Table) -> None:
        for number in range(3):
            await table.claim(host(0), str(number))
        with pytest.raises(RequestRefused, match="3 are the most") as refused:
            await table.claim(host(0), "more")
        assert refused.value.code == "KVD-TOO-MANY-READERS"
        for number in range(10):
            table.release(host(0), f"stranger-{number}")
        assert (await table.claim(host(1), "other")).seconds > 0

    run(work)


def test_leases_are_counted_by_engine_at_no_cost() -> None:
    async def work(table: Table) -> None:
        table.leases.open(owner("q"), tuple(OpenLease(str(n), 60.0) for n in range(1000)))
        assert (table.leases.count("p"), table.leases.count("q"), table.leases.count("z")) == (1, 1000, 0)
        table.leases.present(owner("q"), (OpenLease("7", 60.0),))
        assert table.leases.count("q") == 1
        table.leases.owner_gone(owner("q"))
        assert table.leases.count("q") == 0
        await turned_until(lambda: len(table.leases.table) == 1)

    run(work)


def test_a_registration_that_has_no_room_for_all_ends_no_lease_that_it_does_not_list() -> None:
    async def work(table: Table) -> None:
        table.leases.open(owner("q"), tuple(OpenLease(str(n), 60.0) for n in range(6)))
        key = LeaseKey(engine_id="q", request_id="5")
        await table.leases.claim(LeaseClaim(key=key, reader="one"), host(0))
        back = owner("q")
        back.route = b"another connection"
        table.leases.present(back, (OpenLease("1", 60.0),), complete=False)
        assert table.leases.count("q") == 6
        assert table.leases.table["q", "5"].owner is back, "it is asked for more where it is now"
        table.leases.open_held(back, (OpenLease("5", 60.0), OpenLease("6", 60.0)))
        assert table.leases.count("q") == 7
        table.leases.release(LeaseRelease(key=key, reader="other"), host(1))
        assert ("q", "5") in table.leases.table, "the first one still reads"
        unknown = LeaseKey(engine_id="q", request_id="6")
        table.leases.release(LeaseRelease(key=unknown, reader="other"), host(1))
        assert ("q", "6") in table.leases.table, "readers of a kvd before this one may still read"
        table.leases.present(back, (OpenLease("1", 60.0),))
        assert table.leases.count("q") == 1
        other = owner("q")
        other.incarnation = "the next"
        table.leases.present(other, (), complete=False)
        assert table.leases.count("q") == 0, "another incarnation holds nothing of this one's"

    run(work)


async def turned_until(look: Callable[[], bool]) -> None:
    """Let the loop turn until it is so: there is nothing that would tell."""
    for _ in range(100_000):
        if look():
            return
        await asyncio.sleep(0)
    raise AssertionError("not so after 100,000 turns")


def test_an_owner_of_very_many_leases_comes_and_goes_without_holding_the_loop() -> None:
    """What is asked for meanwhile is answered as if all had been taken at once."""

    async def work(table: Table) -> None:
        loop, longest, ended = asyncio.get_running_loop(), 0.0, asyncio.Event()

        async def ticks() -> None:
            nonlocal longest
            while not ended.is_set():
                began = time.thread_time()  # what others of this machine take is not the table's
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - began)

        gc.collect()
        gc.freeze()  # as kvd does: else all that the tests imported is looked at
        ticking = asyncio.create_task(ticks())
        await asyncio.sleep(0)
        many, big = tuple(OpenLease(str(n), 60.0) for n in range(8_000)), owner("q")
        table.leases.present(big, many)
        assert table.leases.count("q") == 8_000
        last = LeaseKey(engine_id="q", request_id="7999")
        table.leases.closed(LeaseClosed(engine_id="q", request_id="7998", end="aborted"))
        claimed = await table.leases.claim(LeaseClaim(key=last, reader="one"), host(0))
        assert claimed.seconds > 50
        table.leases.open(big, (OpenLease("7997", 30.0),))
        await turned_until(lambda: len(table.leases.table) == 8_000)  # with the one of `run`
        assert table.leases.count("q") == 7_999
        assert ("q", "7998") not in table.leases.table, "freed blocks are not held again"
        assert table.leases.table["q", "7997"].expires < loop.time() + 31
        big.state = "gone"
        table.leases.owner_gone(big)
        assert (await table.leases.claim(LeaseClaim(key=last, reader="one"), host(0))).seconds == 0
        await turned_until(lambda: not table.leases.count("q"))
        ended.set()
        await ticking
        gc.unfreeze()
        assert longest < 0.05

    run(work)


def test_what_an_owner_no_longer_lists_is_open_for_nobody_and_taken_out_one_slice_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(table: Table) -> None:
        big = owner("q")
        table.leases.open(big, tuple(OpenLease(str(n), 60.0) for n in range(50)))
        monkeypatch.setattr("kvd.service.slices.SLICE_SECONDS", 0.0)
        table.leases.present(big, (OpenLease("0", 60.0),))
        assert len(table.leases.table) == 50, "one of 49 is out, and that of `run` is there"
        claims = [LeaseClaim(key=LeaseKey(engine_id="q", request_id=str(n)), reader="x") for n in range(50)]
        assert [n for n in range(50) if (await table.leases.claim(claims[n], host(0))).seconds] == [0]
        left = next(name for name in table.leases.table if name not in {("p", "r"), ("q", "0")})
        table.leases.open(big, (OpenLease(left[1], 60.0),))
        await turned_until(lambda: len(table.leases.table) == 3)
        for _ in range(5):
            await asyncio.sleep(0)
        assert set(table.leases.table) == {("p", "r"), ("q", "0"), left}
        assert not table.ended

    run(work)


def test_a_new_owner_has_nothing_to_do_with_the_readers_of_the_one_before() -> None:
    async def work(table: Table) -> None:
        assert (await table.claim(host(0), "one")).seconds > 0
        before, after = table.leases.table["p", "r"].owner, owner()
        before.state, after.incarnation = "gone", "another"
        table.leases.present(after, (OpenLease("r", 20.0),))
        assert table.leases.table["p", "r"].owner is after
        assert table.leases.readers == 0
        table.release(host(1), "two")
        assert not table.ended, "who reads under it is not known"

    run(work)


STEPS = st.lists(
    st.tuples(st.sampled_from(("claim", "release")), st.integers(0, 2), st.sampled_from("xyz")), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_lease_ends_when_the_last_reader_has_gone_and_not_before(steps: list[tuple[str, int, str]]) -> None:
    """Whatever hosts say in whatever order: of each reader only its own host's words count."""

    async def work(table: Table) -> None:
        reading: set[tuple[int, str]] = set()
        gone: set[tuple[int, str]] = set()
        for what, number, reader in steps:
            one = (number, reader)
            if what == "claim":
                claimed = await table.claim(host(number), reader)
                assert (claimed.seconds > 0) == (not table.ended and one not in gone)
                if claimed.seconds:
                    reading.add(one)
            else:
                before = set(reading)
                table.release(host(number), reader)
                reading.discard(one)
                if not table.ended:
                    assert reading or one in gone
                elif before - {one}:
                    raise AssertionError(f"{one} ended what {before} read")
                gone.add(one)
            if table.ended:
                return
            assert table.leases.readers == len(reading)

    run(work)


def test_what_an_operator_ended_ends_as_aborted_when_its_reader_s_time_is_over() -> None:
    async def work(table: Table) -> None:
        table.leases.open(owner(), (OpenLease("r", 0.2),))
        assert (await table.claim(host(0), "one")).seconds > 0
        lease = table.leases.find(("p", "r"))
        assert lease is not None
        table.leases.end(lease)
        assert (await table.claim(host(1), "two")).ended
        await table.heard.wait()
        assert table.ended == ["aborted"]
        assert table.leases.find(("p", "r")) is None
        table.leases.end(lease)  # what is not open is nothing to end
        assert table.ended == ["aborted"]

    run(work, margin_seconds=0.0)
