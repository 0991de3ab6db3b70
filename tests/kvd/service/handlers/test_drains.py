"""Draining over real kvds: what is let in until when, what goes on, who sees it, and what a restart makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.wire.drain import DrainEngines, DrainRow, EngineHolds, EnginesDraining, SetDraining
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Ok
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker
from tests.support.lender import Lender

GRACE = 0.3


def drained(
    daemon: Daemon, engine_id: str, action: str = "begin", grace: float = GRACE
) -> dict[str, DrainRow]:
    """What kvd answers, by engine."""
    order = msgspec.convert({"engine_id": engine_id, "action": action, "grace_seconds": grace}, DrainEngines)
    answer = daemon.ask(order)
    assert isinstance(answer, EnginesDraining)
    return {row.engine_id: row for row in answer.rows}


def looked(daemon: Daemon, engine_id: str) -> DrainRow:
    return drained(daemon, engine_id, "look")[engine_id]


@contextmanager
def decoding(daemon: Daemon, name: str = "d", policy: str = "recompute") -> Iterator[KvdSession]:
    """The session of a decoder's scheduler."""
    engine = facts(name, role="decode")
    card = msgspec.structs.replace(scheduler(engine), policy=policy)
    with session(daemon, worker(engine)), session(daemon, card) as made:
        yield made


def claim(reader: KvdSession, key: LeaseKey, name: str, more: float = 0.0) -> LeaseClaimed:
    asked = LeaseClaim(key=key, reader=name.ljust(32, "0"), extend_seconds=more)
    answer = reader.call(asked, 10.0).result(15.0)
    assert isinstance(answer, LeaseClaimed)
    return answer


def test_what_is_claimed_goes_on_and_nobody_comes_in_after_the_grace() -> None:
    with daemons(2) as (there, here), Lender(there) as lender, decoding(here) as reader:
        mine, free = lender.open("mine"), lender.open("free")
        assert claim(reader, mine, "one").seconds > 0
        row = drained(there, "p")["p"]
        assert (row.draining, row.leases, row.claimed, row.reads) == (True, 2, 1, 0)
        assert 0 < row.grace <= GRACE
        assert lender.wait_ended() == [("free", "aborted")]

        for key in (mine, free):
            late = claim(reader, key, "two")
            assert (late.seconds, late.ended) == (0.0, True)
        assert claim(reader, mine, "two").reason == "engine 'p' is draining"
        assert claim(reader, mine, "one", 90.0).seconds > 60.0, "who reads may have more time"
        assert looked(there, "p").held == 1
        release = LeaseRelease(key=mine, reader="one".ljust(32, "0"))
        assert reader.call(release, 10.0).result(15.0) == Ok()
        assert wait_for(lambda: looked(there, "p").held == 0)
        assert looked(there, "p").note == "its scheduler does not say: kvd itself lets no further reader in"


def test_a_claim_within_the_grace_is_let_in_and_a_late_lease_has_a_grace_of_its_own() -> None:
    with daemons(1) as (kvd,), Lender(kvd) as lender, decoding(kvd) as reader:
        key = lender.open("early")
        drained(kvd, "p", grace=30.0)
        assert claim(reader, key, "one").seconds > 0
        drained(kvd, "p", "undo")
        drained(kvd, "p", grace=0.0)
        lender.open("late")
        assert lender.wait_ended() == [("late", "aborted")]


def test_undo_lets_readers_in_again() -> None:
    with daemons(1) as (kvd,), Lender(kvd) as lender, decoding(kvd) as reader:
        key = lender.open("r")
        assert claim(reader, key, "one").seconds > 0
        drained(kvd, "p", grace=0.0)
        assert wait_for(lambda: claim(reader, key, "two").ended)
        assert not drained(kvd, "p", "undo")["p"].draining
        assert claim(reader, key, "three").seconds > 0
        lender.open("more")
        assert lender.holds() == 2


def test_a_decoder_that_drains_claims_nothing_new_and_renews_what_it_has() -> None:
    with daemons(2) as (there, here), Lender(there) as lender, decoding(here) as reader:
        old, new = lender.open("old"), lender.open("new")
        assert claim(reader, old, "one").seconds > 0
        assert drained(here, "d", grace=0.0)["d"].reads == 1
        with pytest.raises(RefusedByDaemon) as refused:
            claim(reader, new, "two")
        assert refused.value.code == "KVD-ENGINE-DRAINING"
        assert claim(reader, old, "one", 90.0).seconds > 60.0


def test_a_decoder_whose_requests_would_fail_is_refused_nothing() -> None:
    with daemons(1) as (kvd,), Lender(kvd) as lender, decoding(kvd, policy="fail") as reader:
        key = lender.open("r")
        drained(kvd, "d", grace=0.0)
        assert claim(reader, key, "one").seconds > 0


def test_a_drain_is_seen_in_the_lists_and_gauges_of_both_hosts() -> None:
    with daemons(2) as (there, here), ExitStack() as stack:
        engine = facts("p", role="prefill")
        stack.enter_context(session(there, worker(engine)))
        stack.enter_context(session(there, scheduler(engine)))
        decoder = facts("d", role="decode")
        reader = stack.enter_context(session(here, worker(decoder)))
        ask = GetPeer(local_engine="d", engine_id="p", endpoint=there.endpoint)
        reader.call(ask, 20.0).result(25.0)
        assert not here.engines()["p"].draining
        drained(there, "p")
        assert there.engines()["p"].draining
        assert wait_for(lambda: here.engines()["p"].draining)
        assert there.status().gauges["engines.draining"] == 1
        drained(there, "p", "undo")
        assert wait_for(lambda: not here.engines()["p"].draining)


def test_a_scheduler_is_told_and_what_it_says_is_shown() -> None:
    told: list[SetDraining] = []

    def answer(message: Message) -> Message | None:
        if not isinstance(message, SetDraining):
            return None
        told.append(message)
        return EngineHolds(prefills=1, pushes=2, loads=3)

    engine = facts("p")
    with daemons(1) as (kvd,), session(kvd, worker(engine)), session(kvd, scheduler(engine), answer):
        row = drained(kvd, "p", grace=30.0)["p"]
        assert (row.prefills, row.pushes, row.loads, row.held, row.note) == (1, 2, 3, 6, "")
        assert told[-1].seconds is not None
        assert 29 < told[-1].seconds <= 30
        drained(kvd, "p", "undo")
        assert told[-1].seconds is None


def test_an_engine_that_is_started_again_does_not_drain_and_a_kvd_that_is_learns_it_from_its_scheduler() -> (
    None
):
    told: list[float | None] = []

    def note(message: Message) -> Message | None:
        if isinstance(message, SetDraining):
            told.append(message.seconds)
            return EngineHolds(prefills=0, pushes=0, loads=0)
        return None

    engine = facts("p")
    card = scheduler(engine)
    with daemons(1) as (kvd,):
        with session(kvd, worker(engine)), ExitStack() as stack:
            held = [card]
            made = KvdSession(lambda: held[0], note, directory=kvd.directory)
            stack.callback(made.close)
            made.wait(lambda state: state.connected, 20.0)
            drained(kvd, "p", grace=0.0)
            assert wait_for(lambda: told)
            held[0] = msgspec.structs.replace(card, draining=0.0)
            kvd.kill()
            kvd.start()
            assert wait_for(lambda: "p" in kvd.engines() and kvd.engines()["p"].draining, 20.0)
        assert wait_for(lambda: kvd.engines()["p"].state == "gone")
        with session(kvd, worker(engine)), session(kvd, scheduler(engine)):
            assert wait_for(lambda: kvd.engines()["p"].scheduler)
            assert not kvd.engines()["p"].draining


def test_who_read_before_a_restart_of_kvd_is_let_in_by_the_one_after_it() -> None:
    engine = facts("p")
    lease = OpenLease("r", 60.0, 1, 1)
    card = msgspec.structs.replace(scheduler(engine, (lease,)), draining=0.0)
    with daemons(1) as (kvd,), session(kvd, worker(engine)), session(kvd, card), decoding(kvd) as reader:
        assert wait_for(lambda: kvd.engines()["p"].draining)
        key = LeaseKey(engine_id="p", request_id="r", endpoint=kvd.endpoint)
        assert claim(reader, key, "one", 10.0).seconds > 0
        assert looked(kvd, "p").leases == 1


def test_a_host_that_drains_has_engines_drain_that_come_later() -> None:
    with daemons(1) as (kvd,), ExitStack() as stack:
        for name in ("first", "second"):
            engine = facts(name)
            stack.enter_context(session(kvd, worker(engine)))
            stack.enter_context(session(kvd, scheduler(engine)))
            if name == "first":
                assert [row.draining for row in drained(kvd, "").values()] == [True]
        assert {name: row.draining for name, row in kvd.engines().items()} == {"first": True, "second": True}
        assert [row.draining for row in drained(kvd, "", "undo").values()] == [False, False]


def test_what_makes_no_sense_is_refused() -> None:
    with daemons(1) as (kvd,):
        unknown = kvd.ask_refused(DrainEngines(engine_id="nobody", action="begin"))
        assert unknown.code == "KVD-ENGINE-UNKNOWN"
        forever = kvd.ask_refused(DrainEngines(action="begin", grace_seconds=1e6))
        assert forever.code == "KVD-BAD-ORDER"
