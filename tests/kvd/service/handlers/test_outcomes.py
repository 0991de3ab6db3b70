"""How requests were served: steps of the last minutes, and real schedulers' reports to real kvds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.service.engines.outcome_counts import CLAIM_SECONDS, MOST_KEYS, STEP_SECONDS, STEPS, OutcomeCounts
from kvd.vllm.scheduler.served import Served as Tally
from kvd.wire.frame import Message
from kvd.wire.identity import EngineFacts, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseOpened
from kvd.wire.limits import MOST
from kvd.wire.outcomes import GetOutcomes, OutcomeCount, OutcomeRow, Outcomes, ReportOutcomes
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Ok
from tests.kvd.service.test_metrics import get
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, wait_for, worker
from tests.support.ports import free_port

FACTS = EngineFacts(engine_id="e", model="m", role="decode")


def counted(outcome: str, requests: int, tokens: int, code: str = "") -> OutcomeCount:
    return OutcomeCount(outcome, code, requests, tokens)  # type: ignore[arg-type]


def report(*totals: OutcomeCount, known: tuple[OutcomeCount, ...] = ()) -> ReportOutcomes:
    return ReportOutcomes(engine_id="e", totals=totals, known=known)


# --- steps ---


def test_what_is_new_since_the_last_report_counts() -> None:
    counts = OutcomeCounts()
    counts.report("i", report(counted("loaded", 3, 30)), 1000.0)
    counts.report("i", report(counted("loaded", 5, 70)), 1002.0)
    row = counts.row(FACTS, 60.0, 1003.0)
    assert row.lately == row.totals == (counted("loaded", 5, 70),)
    assert (row.engine_id, row.role, row.model) == ("e", "decode", "m")


def test_the_window_slides_and_totals_stay() -> None:
    counts = OutcomeCounts()
    counts.report("i", report(counted("missed", 1, 10)), 1000.0)
    counts.report("i", report(counted("missed", 4, 40)), 1100.0)
    assert counts.row(FACTS, 60.0, 1101.0).lately == (counted("missed", 3, 30),)
    late = counts.row(FACTS, 60.0, 1300.0)
    assert (late.lately, late.totals) == ((), (counted("missed", 4, 40),))


def test_only_so_many_steps_are_kept() -> None:
    counts = OutcomeCounts()
    for n in range(3 * STEPS):
        counts.report("i", report(counted("loaded", n + 1, 0)), n * STEP_SECONDS)
    assert counts.row(FACTS, 1e9, 3 * STEPS * STEP_SECONDS).lately == (counted("loaded", STEPS, 0),)


def test_an_engine_that_started_again_counts_from_nothing() -> None:
    counts = OutcomeCounts()
    counts.report("i", report(counted("loaded", 9, 90)), 1000.0)
    counts.report("j", report(counted("loaded", 2, 20)), 1001.0)
    assert counts.row(FACTS, 60.0, 1002.0).totals == (counted("loaded", 11, 110),)


def test_what_is_past_counting_can_still_be_told() -> None:
    counts = OutcomeCounts()
    for incarnation in "abc":
        counts.report(incarnation, report(counted("loaded", MOST, MOST)), 1000.0)
    assert counts.row(FACTS, 60.0, 1000.0).totals == (counted("loaded", MOST, MOST),)


def test_a_kvd_that_started_again_counts_what_no_kvd_has_acknowledged() -> None:
    counts = OutcomeCounts()
    counts.report("i", report(counted("loaded", 900, 9000), known=(counted("loaded", 890, 8900),)), 1000.0)
    assert counts.row(FACTS, 60.0, 1001.0).totals == (counted("loaded", 10, 100),)


def test_codes_are_bounded() -> None:
    counts = OutcomeCounts()
    for n in range(4 * MOST_KEYS):
        counts.report("i", report(counted("missed", 1, 1, f"C{n}")), 1000.0)
    row = counts.row(FACTS, 60.0, 1001.0)
    assert len(row.totals) <= MOST_KEYS + 1
    assert sum(n.requests for n in row.totals) == 4 * MOST_KEYS


# --- leases ---


def test_a_lease_that_nobody_claims_in_time_is_unclaimed() -> None:
    counts = OutcomeCounts()
    counts.opened("e", ["a", "b", "c"], 1000.0)
    counts.claimed("e", "b")
    young, old = (
        counts.row(FACTS, 60.0, 1000.0 + s) for s in (CLAIM_SECONDS - 1, CLAIM_SECONDS + STEP_SECONDS)
    )
    assert (young.leases, young.unclaimed) == (0, 0)
    assert (old.leases, old.unclaimed, old.leases_total, old.claimed_total) == (3, 2, 3, 1)


def test_a_claim_that_is_renewed_or_names_no_lease_counts_once_or_not_at_all() -> None:
    counts = OutcomeCounts()
    counts.opened("e", ["a"], 1000.0)
    for name in ("a", "a", "other"):
        counts.claimed("e", name)
    counts.claimed("nobody", "a")
    assert counts.row(FACTS, 60.0, 1030.0).claimed_total == 1


def test_leases_that_nobody_claims_are_forgotten_and_stay_counted() -> None:
    counts = OutcomeCounts()
    for n in range(2 * STEPS):
        counts.opened("e", [f"r{n}"], n * STEP_SECONDS)
    assert len(counts._engines["e"].waiting) <= STEPS + 1
    counts.claimed("e", "r0")
    row = counts.row(FACTS, 60.0, 2 * STEPS * STEP_SECONDS)
    assert (row.leases_total, row.claimed_total) == (2 * STEPS, 0)


def test_engines_that_are_gone_are_forgotten() -> None:
    counts = OutcomeCounts()
    counts.report("i", report(counted("loaded", 1, 1)), 1000.0)
    counts.forget("e")
    assert counts.row(FACTS, 60.0, 1000.0).totals == ()


# --- over the wire ---


def rows(kvd: Daemon, *, peers: bool = False) -> dict[str, OutcomeRow]:
    answer = kvd.ask(GetOutcomes(peers=peers))
    assert isinstance(answer, Outcomes)
    return {row.engine_id: row for row in answer.rows}


def tally(one: KvdSession, *, soon: bool = True) -> Tally:
    def deliver(
        key: str, message: Callable[[], Message], keep_seconds: float, *, after: float
    ) -> Future[Message]:
        return one.deliver(key, message, keep_seconds, after=after / 20 if soon else after)

    return Tally("e", deliver)


def test_counts_reach_kvd_and_its_metrics_and_survive_its_restarts() -> None:
    port = free_port()
    with daemons() as (kvd,):
        kvd.kill()
        kvd.environment = {"KVD_METRICS_LISTEN": f"127.0.0.1:{port}"}
        kvd.start()
        with session(kvd, scheduler(facts("e"))) as one:
            counts = tally(one)
            for _ in range(7):
                counts.count("loaded", 100)
            wait_for(lambda: rows(kvd)["e"].lately == (counted("loaded", 7, 700),))
            assert (
                'kvd_requests_served_total{engine="e",role="both",outcome="loaded",code=""} 7\n'
                in (get(port, "/metrics")[1])
            )
            kvd.kill()
            for _ in range(5):
                counts.count("missed", 10, "PEER_AWAY")
            kvd.start()
            wait_for(
                lambda: "e" in rows(kvd) and rows(kvd)["e"].totals == (counted("missed", 5, 50, "PEER_AWAY"),)
            )


def test_what_was_counted_last_is_told_at_the_end_and_closing_waits_for_nothing() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))):
        with session(kvd, scheduler(facts("e"))) as one:
            tally(one, soon=False).count("loaded", 3)
            began = time.monotonic()
            one.close()
            assert (
                time.monotonic() - began < 1.5
            )  # not for the 2 s after which it would be told, nor for a thread
        assert rows(kvd)["e"].totals == (counted("loaded", 1, 3),)


def test_only_an_engines_scheduler_may_report() -> None:
    with daemons() as (kvd,), session(kvd, worker(facts("e"))) as one:
        refused = one.call(report(counted("loaded", 1, 1)), 5.0)
        with pytest.raises(RefusedByDaemon, match="scheduler"):
            refused.result(6)
        assert rows(kvd)["e"].totals == ()


def test_claims_are_seen_on_the_prefillers_kvd_and_repeated_announcements_count_once() -> None:
    with (
        daemons(2) as (here, there),
        session(here, worker(facts("p"))),
        session(there, worker(facts("d"))) as decoder,
        session(here, scheduler(facts("p"))) as prefiller,
    ):
        for _ in range(2):
            opened = LeaseOpened(engine_id="p", leases=(OpenLease("a", 60.0), OpenLease("b", 60.0)))
            assert prefiller.call(opened, 5).result(6) == Ok()
        key = LeaseKey(engine_id="p", request_id="a", endpoint=here.endpoint)
        decoder.call(LeaseClaim(key=key, reader="reader"), 5).result(6)
        row = rows(here)["p"]
        assert (row.leases_total, row.claimed_total) == (2, 1)
        linked = wait_for(lambda: rows(there, peers=True).get("p"))
        assert (linked.endpoint, linked.leases_total) == (here.endpoint, 2)
        assert "p" not in rows(there)


def test_a_peer_that_is_away_is_left_out_at_once() -> None:
    with daemons(2) as (here, there), session(there, worker(facts("d"))) as decoder:
        key = LeaseKey(engine_id="p", request_id="a", endpoint=here.endpoint)
        decoder.call(LeaseClaim(key=key, reader="reader"), 5).result(6)
        here.kill()
        began = time.monotonic()
        assert set(rows(there, peers=True)) == {"d"}
        assert time.monotonic() - began < 3.0
