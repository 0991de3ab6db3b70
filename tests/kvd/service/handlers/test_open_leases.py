"""What is read under leases just now, as an operator asks for it: on the prefiller's host and on the decoder's."""

from __future__ import annotations

import time
from contextlib import ExitStack

from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseOpened, LeaseRelease
from kvd.wire.order import EndLease, LeaseEnding
from kvd.wire.query import LeaseList, LeaseRow, ListLeases
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Ok
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker
from tests.support.lender import Lender


def listed(daemon: Daemon, limit: int = 256) -> LeaseList:
    answer = daemon.ask(ListLeases(limit=limit))
    assert isinstance(answer, LeaseList)
    return answer


def test_a_lease_is_listed_on_both_hosts_while_somebody_reads_under_it() -> None:
    with daemons(2) as (there, here), ExitStack() as stack:
        prefill, decode = facts("p", role="prefill"), facts("d", role="decode")
        sessions = {}
        for daemon, engine in ((there, prefill), (here, decode)):
            stack.enter_context(session(daemon, worker(engine)))
            sessions[engine.engine_id] = stack.enter_context(session(daemon, scheduler(engine)))
        opened = tuple(OpenLease(name, 30.0, 7) for name in ("r1", "r2", "r3"))
        assert isinstance(sessions["p"].call(LeaseOpened(engine_id="p", leases=opened), 5.0).result(), Ok)
        before = listed(there)
        assert (before.rows, before.open, before.given) == ((), 3, 0)

        keys = {n: LeaseKey(engine_id="p", request_id=n, endpoint=there.endpoint) for n in ("r1", "r2")}
        for name, key in keys.items():
            claim = LeaseClaim(key=key, reader=f"reader-{name}".ljust(32, "0"))
            assert isinstance(sessions["d"].call(claim, 5.0).result(), LeaseClaimed)
        given, taken = listed(there), listed(here)
        assert [
            (row.engine_id, row.request_id, row.reader, row.readers, row.blocks) for row in given.rows
        ] == [
            ("p", "r1", "", 1, 7),
            ("p", "r2", "", 1, 7),
        ]
        assert (given.open, given.given, given.taken) == (3, 2, 0)
        assert [(row.engine_id, row.request_id, row.reader) for row in taken.rows] == [
            ("p", "r1", "d"),
            ("p", "r2", "d"),
        ]
        assert (taken.open, taken.given, taken.taken) == (0, 0, 2)
        assert all(0 <= row.age < 20 and 0 < row.left <= 30 for row in given.rows)
        assert {row.endpoint for row in taken.rows} == {there.endpoint}
        assert [row.request_id for row in listed(there, limit=1).rows] == ["r1"]
        assert listed(there, limit=1).given == 2

        release = LeaseRelease(key=keys["r1"], reader="reader-r1".ljust(32, "0"))
        assert isinstance(sessions["d"].call(release, 5.0).result(), Ok)
        assert [row.request_id for row in listed(there).rows] == ["r2"]
        assert [row.request_id for row in listed(here).rows] == ["r2"]


def every(daemon: Daemon, engine_id: str = "", after: str = "") -> tuple[LeaseRow, ...]:
    """All leases of a kvd, page by page."""
    answer = daemon.ask(ListLeases(every=True, engine_id=engine_id, after=after))
    assert isinstance(answer, LeaseList)
    return answer.rows + (every(daemon, engine_id, answer.more) if answer.more else ())


def ended(daemon: Daemon, request_id: str, *, carry_out: bool = True) -> LeaseEnding:
    answer = daemon.ask(EndLease(engine_id="p", request_id=request_id, carry_out=carry_out))
    assert isinstance(answer, LeaseEnding)
    return answer


def test_every_lease_is_listed_with_who_claimed_it_and_an_engine_s_alone_where_it_is_named() -> None:
    with daemons(2) as (there, here), Lender(there) as lender, ExitStack() as stack:
        near, far = facts("near", role="decode"), facts("far", role="decode")
        readers = {}
        for daemon, engine in ((there, near), (here, far)):
            stack.enter_context(session(daemon, worker(engine)))
            readers[engine.engine_id] = stack.enter_context(session(daemon, scheduler(engine)))
        keys = [lender.open(name, blocks=n) for n, name in enumerate(("both", "none"), 1)]
        for name, reader in readers.items():
            claim = LeaseClaim(key=keys[0], reader=name.ljust(32, "0"))
            assert isinstance(reader.call(claim, 5.0).result(), LeaseClaimed)

        rows = {(row.request_id, row.reader): row for row in every(there)}
        assert set(rows) == {("both", ""), ("none", ""), ("both", "near")}
        both, none = rows["both", ""], rows["none", ""]
        assert {one.who for one in both.claims} == {"near", "another host"}
        assert (both.readers, both.blocks, both.ending) == (2, 1, False)
        assert (none.readers, none.blocks, none.claims) == (0, 2, ())
        assert all(0 < one.left <= 60 for one in both.claims)
        assert [(row.request_id, row.reader) for row in every(here)] == [("both", "far")]
        assert [(row.request_id, row.reader) for row in every(there, "near")] == [("both", "near")]
        assert every(there, "nobody") == ()


def test_a_list_longer_than_an_answer_comes_in_pages() -> None:
    with daemons(1) as (kvd,), Lender(kvd) as lender:
        names, now = [f"r{n:04}" for n in range(2100)], time.monotonic()
        for name in names:  # its owner has to say so again where it registers again
            lender.leases.open(name, 600.0, 1, now)
        held = lender.leases.held(now)
        for start in range(0, len(names), 100):
            opened = LeaseOpened(engine_id="p", leases=held[start : start + 100])
            lender.session.call(opened, 10.0).result(10.0)
        first = kvd.ask(ListLeases(every=True))
        assert isinstance(first, LeaseList)
        assert (len(first.rows), bool(first.more)) == (2048, True)
        assert [row.request_id for row in every(kvd)] == names


def test_a_lease_that_nobody_claimed_ends_at_once() -> None:
    with daemons(1) as (kvd,), Lender(kvd) as lender:
        lender.open("r")
        plan = ended(kvd, "r", carry_out=False)
        assert (plan.blocks, plan.readers, plan.seconds, plan.carried_out) == (3, 0, 0.0, False)
        assert lender.still_holds()
        assert ended(kvd, "r").carried_out
        assert lender.wait_ended() == [("r", "aborted")]
        assert kvd.ask_refused(EndLease(engine_id="p", request_id="r")).code == "KVD-LEASE-UNKNOWN"


def test_a_claim_keeps_what_it_was_promised_and_nobody_else_is_let_in() -> None:
    with daemons(2) as (there, here), Lender(there) as lender, ExitStack() as stack:
        decoder = facts("d", role="decode")
        stack.enter_context(session(here, worker(decoder)))
        reader = stack.enter_context(session(here, scheduler(decoder)))
        key, one, other = lender.open("r"), "1" * 32, "2" * 32

        def claim(name: str, more: float = 0.0) -> LeaseClaimed:
            answer = reader.call(LeaseClaim(key=key, reader=name, extend_seconds=more), 5.0).result()
            assert isinstance(answer, LeaseClaimed)
            return answer

        promised = claim(one).seconds
        plan = ended(there, "r")
        assert plan.readers == 1
        assert promised <= plan.seconds <= 60.0
        assert lender.still_holds(), "somebody may be reading"
        late = claim(other)
        assert (late.seconds, late.ended, late.reason) == (0.0, True, "an operator ended lease 'r'")
        renewed = claim(one, 500.0)
        assert 0 < renewed.seconds <= 60.0
        assert "an operator ended lease" in renewed.reason
        assert [(row.ending, row.readers) for row in every(there)] == [(True, 1)]
        assert isinstance(reader.call(LeaseRelease(key=key, reader=one), 5.0).result(), Ok)
        assert lender.wait_ended() == [("r", "released")]
        assert wait_for(lambda: not every(there))


def test_who_may_not_order_an_engine_about_ends_none_of_its_leases() -> None:
    with daemons(1) as (kvd,):
        refused = kvd.ask_refused(EndLease(engine_id="nobody", request_id="r", carry_out=True))
        assert refused.code == "KVD-ENGINE-UNKNOWN"
