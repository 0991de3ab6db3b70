"""Who is a member: what a source tells decides whom to link to, and never whom to drop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import cast

import pytest

from kvd.service.membership import members as module
from kvd.service.membership.members import Members, Taker
from kvd.service.membership.told import MOST_MEMBERS, ToldHost
from kvd.service.peers.discovery import WRITTEN_DOWN, Looking
from kvd.service.peers.links import PeerLinks
from kvd.wire.identity import Endpoint

HERE = Endpoint("10.0.0.1", 9401)
A, B, C = (Endpoint(f"10.0.0.{number}", 9401) for number in (2, 3, 4))


class Links:
    """Stands for the links: which work, which lead here, which keys are expected."""

    def __init__(self) -> None:
        self.kept: set[Endpoint] = set()
        self.written: frozenset[Endpoint] = frozenset()
        self.working: set[Endpoint] = set()
        self.ours: set[Endpoint] = set()
        self.keys: dict[Endpoint, str] = {}
        self.closed: list[Endpoint] = []
        self.most = MOST_MEMBERS

    def expected(self, endpoint: Endpoint) -> str | None:
        return self.keys.get(endpoint, "key")

    def up(self, endpoint: Endpoint) -> bool:
        return endpoint in self.working

    def leads_here(self, endpoint: Endpoint) -> bool:
        return endpoint in self.ours

    async def let_go(self, endpoint: Endpoint) -> None:
        self.closed.append(endpoint)


class Fleet:
    """Members, and who is looked at now."""

    def __init__(self, source: str = "etcd") -> None:
        self.links, self.counters = Links(), Counter[str]()
        self.looked: dict[Endpoint, Looking] = {}
        links = cast("PeerLinks", self.links)
        self.members = Members(source, links, self.discover, HERE, self.counters)

    async def discover(self, endpoint: Endpoint, looking: Looking) -> None:
        self.looked[endpoint] = looking
        try:
            await asyncio.Event().wait()
        finally:
            del self.looked[endpoint]


def told(*endpoints: Endpoint, key: str | None = None) -> list[ToldHost]:
    return [ToldHost(one, key) for one in endpoints]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def played(play: Callable[[Fleet], object], source: str = "etcd") -> Fleet:
    """A fleet with which something was done on a loop."""

    async def run() -> Fleet:
        fleet = Fleet(source)
        result = play(fleet)
        if asyncio.iscoroutine(result):
            await result
        await fleet.members.look()
        await turns()
        seen = dict(fleet.looked)
        running = asyncio.create_task(fleet.members.run(None))
        await turns()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert fleet.looked == {}, "the end of kvd ends all looks"
        fleet.looked = seen
        return fleet

    return asyncio.run(run())


def test_whom_the_source_names_is_linked_and_looked_at_but_not_preferred() -> None:
    fleet = played(lambda fleet: fleet.members.take(told(A, B, HERE)))
    assert set(fleet.looked) == {A, B}
    assert fleet.links.kept == {A, B}
    assert not any(looking.preferred for looking in fleet.looked.values())


def test_who_vanished_stays_while_its_link_works_and_is_forgotten_when_it_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(fleet: Fleet) -> None:
        fleet.members.take(told(A, B, C))
        await fleet.members.look()
        fleet.links.working |= {A, B}
        fleet.members.take(told(C))
        await fleet.members.look()
        await turns()
        assert set(fleet.looked) == {A, B, C}
        assert fleet.members.vanished == [A, B]
        fleet.links.working.discard(A)
        await fleet.members.look()
        assert A in fleet.looked, "a source that lost its data has some seconds to get them back"
        monkeypatch.setattr(module, "FORGET_SECONDS", 0.0)
        await fleet.members.look()
        await turns()

    fleet = played(play)
    assert set(fleet.looked) == {B, C}
    assert fleet.links.closed == [A]
    assert fleet.counters["membership.forgotten"] == 1


def test_a_source_that_is_away_changes_nothing_though_links_are_down() -> None:
    async def play(fleet: Fleet) -> None:
        fleet.members.take(told(A, B))
        await fleet.members.look()
        fleet.members.away("no answer")
        fleet.members.away("no answer still")
        await fleet.members.look()
        await turns()
        row = fleet.members.row()
        assert (row.state, row.reason, row.members) == ("away", "no answer still", 2)
        fleet.members.take(told(A, B))
        await fleet.members.look()
        assert (fleet.members.row().state, fleet.members.row().reason) == ("known", "")

    fleet = played(play)
    assert set(fleet.looked) == {A, B}
    assert fleet.counters["membership.failures"] == 2


def test_an_answer_that_is_not_full_makes_nobody_vanish() -> None:
    async def play(fleet: Fleet) -> None:
        fleet.members.take(told(A, B))
        await fleet.members.look()
        fleet.members.take(told(C), full=False)
        await fleet.members.look()

    assert set(played(play).looked) == {A, B, C}


def test_whom_the_operator_wrote_down_is_a_member_whatever_the_source_says() -> None:
    async def play(fleet: Fleet) -> None:
        fleet.links.written = frozenset({A})
        running = asyncio.create_task(fleet.members.run(None))
        await turns()
        fleet.members.take(told(B))
        await fleet.members.look()
        await turns()
        assert fleet.looked[A] is WRITTEN_DOWN
        assert set(fleet.looked) == {A, B}
        assert fleet.members.vanished == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        fleet.members._joined.clear()

    played(play)


def test_another_key_than_is_expected_keeps_a_host_out_until_they_agree(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(fleet: Fleet) -> None:
        fleet.links.keys = {A: "expected-key"}
        for _ in range(3):
            fleet.members.take(told(A, key="told-\x1b[31mkey"))
            await fleet.members.look()
        assert fleet.members.row().other_key == 1
        assert fleet.links.kept == set()
        fleet.members.take(told(A, key="expected-key"))
        await fleet.members.look()

    fleet = played(play)
    assert set(fleet.looked) == {A}
    [line] = [one.getMessage() for one in caplog.records if "expected here" in one.getMessage()]
    assert "expected-key" in line
    assert "told-" in line
    assert "\x1b" not in line


def test_a_lie_about_the_key_of_a_host_that_is_linked_ends_nothing() -> None:
    async def play(fleet: Fleet) -> None:
        fleet.members.take(told(A, key="key"))
        await fleet.members.look()
        fleet.members.take(told(A, key="a lie"))
        await fleet.members.look()
        assert fleet.members.row().other_key == 1

    assert set(played(play).looked) == {A}


def test_this_kvd_under_another_address_is_no_member() -> None:
    async def play(fleet: Fleet) -> None:
        fleet.members.take(told(A, B))
        await fleet.members.look()
        fleet.links.ours.add(A)
        await fleet.members.look()
        fleet.members.take(told(A, B))
        await fleet.members.look()

    fleet = played(play)
    assert set(fleet.looked) == {B}
    assert fleet.links.kept == {B}


def test_five_thousand_hosts_are_cut_and_those_that_are_linked_stay() -> None:
    many = [Endpoint(f"10.1.{number >> 8}.{number & 255}", 9401) for number in range(5000)]

    async def play(fleet: Fleet) -> None:
        last = max(many, key=lambda one: (one.host, one.port))
        fleet.members.take(told(last))
        await fleet.members.look()
        began = time.process_time()
        fleet.members.take(told(*many))
        await fleet.members.look()
        took = time.process_time() - began
        assert took < 1.0
        assert last in fleet.links.kept
        assert len(fleet.links.kept) == MOST_MEMBERS == fleet.members.row().members
        assert fleet.members._pause() == MOST_MEMBERS / module.LOOKS_A_SECOND

    played(play)


def test_more_members_than_there_may_be_links_are_told_of_with_both_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(fleet: Fleet) -> None:
        fleet.links.most = 2
        fleet.members.take(told(A, B))
        await fleet.members.look()
        assert "at most" not in caplog.text
        fleet.members.take(told(A, B, C))
        for _ in range(3):
            await fleet.members.look()
        assert caplog.text.count("3 kvds are named, and this one links to 2 at most") == 1

    played(play)


def test_a_source_and_a_look_that_fail_start_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.0)
    calls: Counter[str] = Counter()

    async def source(taker: Taker) -> None:
        calls["source"] += 1
        taker.take(told(A))
        raise ValueError("nobody thought of it")

    async def run() -> None:
        fleet = Fleet()

        async def fails(_endpoint: Endpoint, _looking: Looking) -> None:
            calls["look"] += 1
            raise KeyError("this neither")

        fleet.members._discover = fails
        running = asyncio.create_task(fleet.members.run(source))
        while calls["source"] < 3 or calls["look"] < 3:  # noqa: ASYNC110 - a call announces nothing
            await asyncio.sleep(0)
        assert fleet.counters["errors.internal"] >= 5
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert "starts again" in caplog.text
