"""What is read under leases just now, as an operator asks for it: on the prefiller's host and on the decoder's."""

from __future__ import annotations

from contextlib import ExitStack

from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseOpened, LeaseRelease
from kvd.wire.query import LeaseList, ListLeases
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Ok
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, worker


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
