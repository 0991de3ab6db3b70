"""Loads that run beside their claim: nothing of them is reported, and so used, before the claim was answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.wire.lease import LeaseConfirmed
from kvd.worker.cause import Cause, code_of
from kvd.worker.load import Load, LoadClaim, LoadTimes, Standing
from kvd.worker.orders import ClaimAnswer, Fault, LoadOrder, StepOrders
from kvd.worker.pull import unanswered
from kvd.worker.pull.unanswered import Unanswered
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import eventually, order, prefill, ready
from tests.support.rigs.pull import BLOCKS, Rig

REFUSED = Cause("prefiller p no longer keeps blocks of request p-1", "LEASE_ENDED")
CONFIRMED = ClaimAnswer("d-1", 20.0)
LONG = 30.0


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.script.push(ready(made.card))
    yield made
    made.close()


def beside(**changes: object) -> LoadOrder:
    return replace(order(prefill(((5, 6),)), (2, 9)), unanswered=True, **changes)  # type: ignore[arg-type]


def open_load(received: float, deadline: float) -> Load:
    return Load(beside(), LoadTimes(received), deadline, LoadClaim(Standing.OPEN))


def ended(rig: Rig) -> None:
    """Wait until the load has ended, and is kept."""
    eventually(lambda: rig.decoder._ends._unanswered._ended)


def answered(rig: Rig, answer: ClaimAnswer) -> None:
    rig.decoder.start(StepOrders(answered=[answer]))


def test_what_has_come_is_reported_once_its_claim_was_confirmed(rig: Rig) -> None:
    rig.start(beside())
    ended(rig)
    assert rig.same((2, 9), (5, 6))
    assert not rig.decoder.results().received
    assert rig.decoder.outcomes() is None
    assert rig.records() == []
    answered(rig, CONFIRMED)
    assert rig.decoder.results().received == {"d-1"}
    assert rig.causes() == {"d-1": ""}


def test_an_answer_that_is_first_holds_nothing_up(rig: Rig) -> None:
    go_on, reached = rig.gates.stop("poll")
    rig.start(beside())
    assert reached.wait(LONG)
    answered(rig, CONFIRMED)
    assert not rig.decoder.results().received
    go_on.set()
    results = rig.results()
    assert (results.received, results.failed) == ({"d-1"}, set())


def test_what_has_come_of_a_refused_claim_is_a_miss_of_all_its_blocks(rig: Rig) -> None:
    rig.start(beside())
    ended(rig)
    answered(rig, ClaimAnswer("d-1", 0.0, REFUSED))
    results = rig.decoder.results()
    assert (results.failed, results.bad_blocks, results.lost_blocks) == ({"d-1"}, {2, 9}, {2, 9})
    outcomes = rig.decoder.outcomes()
    assert outcomes is not None
    assert (outcomes.loads, outcomes.prefixes) == ({"d-1": REFUSED}, {"d-1": 0})
    (record,) = eventually(rig.records)
    assert (record.state, record.code) == ("miss", "LEASE_ENDED")


def test_a_refused_load_is_reported_only_when_nothing_of_it_can_land(rig: Rig) -> None:
    go_on, reached = rig.gates.stop("poll")
    rig.start(beside())
    assert reached.wait(LONG)
    answered(rig, ClaimAnswer("d-1", 0.0, REFUSED))
    assert not rig.decoder.results(0.05).received, "its read is on the way"
    go_on.set()
    results = rig.results()
    assert (results.failed, results.bad_blocks) == ({"d-1"}, {2, 9})
    assert rig.causes() == {"d-1": REFUSED.text}


def test_a_read_of_a_refused_claim_that_does_not_end_loses_its_lane(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanswered, "REFUSED_SECONDS", 0.05)
    rig.faults.hold = set(range(9))
    rig.start(beside())
    eventually(lambda: rig.decoder.loads.begun["d-1"].times.posted)
    answered(rig, ClaimAnswer("d-1", 0.0, REFUSED))
    assert rig.results().failed == {"d-1"}
    assert rig.gates.closed == 1
    assert rig.causes() == {"d-1": REFUSED.text}


def test_what_is_not_posted_when_its_claim_is_refused_is_not_read() -> None:
    rig = Rig()
    rig.start(beside())  # and waits for its peer to become known
    answered(rig, ClaimAnswer("d-1", 0.0, REFUSED))
    rig.script.calls[0].answer(ready(rig.card))
    assert rig.results().failed == {"d-1"}
    assert rig.untouched(*range(BLOCKS))
    rig.close()


def test_what_came_after_the_confirmed_end_is_a_miss(rig: Rig) -> None:
    rig.start(beside())
    ended(rig)
    answered(rig, ClaimAnswer("d-1", 0.0))
    assert rig.decoder.results().bad_blocks == {2, 9}
    assert rig.causes()["d-1"].startswith("the lease on its blocks ended 0.0 s after the load was ordered")


def test_a_read_that_goes_on_has_no_more_time_than_the_confirmed_lease(rig: Rig) -> None:
    rig.faults.hold = set(range(9))
    rig.start(beside(seconds=LONG))
    load = rig.decoder.loads.begun["d-1"]
    eventually(lambda: load.times.posted)
    answered(rig, ClaimAnswer("d-1", time.monotonic() - load.times.received + 0.2))
    assert load.deadline < load.times.received + LONG
    assert rig.results().failed == {"d-1"}
    assert rig.causes()["d-1"].startswith("not complete within")


def test_an_end_that_its_thread_saw_before_the_deadline_did_is_a_miss() -> None:
    """The thread looked at its deadline, the answer brought an earlier one, and only then did the load end."""
    now = time.monotonic()
    waiting, load = Unanswered(), open_load(now - 2.0, now + LONG)
    waiting.confirm(load, 1.0)
    load.end(None)
    assert not waiting.keeps(load, lambda: None)
    assert code_of(load.claim.refused) == "LEASE_ENDED"


def test_a_load_that_ended_before_the_lease_did_is_good_however_late_that_is_heard() -> None:
    now = time.monotonic()
    waiting, load = Unanswered(), open_load(now - 2.0, now + LONG)
    load.times.ended = now - 1.5
    reported: list[Load] = []
    assert waiting.keeps(load, lambda: reported.append(load))
    waiting.confirm(load, 1.0)
    assert reported == [load]
    assert not load.claim.refused


def test_a_miss_at_the_deadline_keeps_its_pieces_where_the_claim_was_confirmed() -> None:
    """Its end is behind its deadline, as that of every load that was too late; its pieces are not."""
    now = time.monotonic()
    waiting, load = Unanswered(), open_load(now, now + LONG)
    waiting.confirm(load, 20.0)
    load.times.ended, load.cause, load.pieces.done = now + 21.0, Cause("not complete", "TOO_LATE"), 1
    assert not waiting.keeps(load, lambda: None)
    assert not load.claim.refused


# --- what kvd says ahead of the scheduler ---

TOLD = LeaseConfirmed(reader="mine", seconds=20.0)


def test_kvds_word_that_a_claim_is_confirmed_is_an_answer(rig: Rig) -> None:
    rig.start(beside(reader="mine"))
    ended(rig)
    rig.script.push(LeaseConfirmed(reader="of another", seconds=20.0))
    assert not rig.decoder.results().received
    rig.script.push(TOLD)
    assert rig.decoder.results().received == {"d-1"}
    assert rig.causes() == {"d-1": ""}
    answered(rig, CONFIRMED)  # the scheduler's, a step later
    assert not rig.decoder.results().received


def test_so_is_one_that_comes_before_the_loads_order(rig: Rig) -> None:
    rig.script.push(TOLD)
    rig.start(beside(reader="mine"))
    assert rig.results().received == {"d-1"}


def test_and_one_that_comes_while_it_reads(rig: Rig) -> None:
    go_on, reached = rig.gates.stop("poll")
    rig.start(beside(reader="mine"))
    assert reached.wait(LONG)
    rig.script.push(TOLD)
    go_on.set()
    assert rig.results().received == {"d-1"}


def test_what_kvd_promises_counts_from_the_claims_sending_and_a_margin_is_taken_off(rig: Rig) -> None:
    rig.faults.hold = set(range(9))
    rig.start(beside(reader="mine", asked_before=2.0, seconds=LONG))
    load = rig.decoder.loads.begun["d-1"]
    rig.script.push(TOLD)
    assert load.deadline == pytest.approx(load.times.received + 20.0 - 2.0 - 0.5)


def test_a_promise_that_is_over_is_left_to_the_scheduler(rig: Rig) -> None:
    rig.start(beside(reader="mine", asked_before=19.9))
    ended(rig)
    rig.script.push(TOLD)
    assert not rig.decoder.results().received
    answered(rig, ClaimAnswer("d-1", 0.0, REFUSED))
    assert rig.decoder.results().failed == {"d-1"}


def test_a_refusal_of_the_scheduler_counts_after_kvds_word_too(rig: Rig) -> None:
    """Kvd tells of leases. That the prefiller does not fit any more the scheduler hears alone."""
    go_on, reached = rig.gates.stop("poll")
    rig.start(beside(reader="mine"))
    assert reached.wait(LONG)
    rig.script.push(TOLD)
    answered(rig, ClaimAnswer("d-1", 0.0, REFUSED))
    go_on.set()
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": REFUSED.text}


def test_words_for_nobody_are_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "MOST_TOLD", 2)
    for reader in ("mine", "one", "two"):
        rig.script.push(LeaseConfirmed(reader=reader, seconds=20.0))
    rig.start(beside(reader="mine"))
    ended(rig)
    assert not rig.decoder.results().received
    kept = rig.decoder._ends._unanswered
    answered(rig, CONFIRMED)
    assert (list(kept._told), kept._readers) == (["one", "two"], {})


# --- what waits for no answer ---


def test_a_load_of_which_nothing_came_waits_for_no_answer(rig: Rig) -> None:
    rig.faults.refuse = set(range(9))
    rig.start(beside())
    assert rig.results().bad_blocks == {2, 9}
    assert rig.causes()["d-1"]
    answered(rig, CONFIRMED)  # which comes too late
    assert not rig.decoder.results().received


def test_nobody_waits_for_the_answer_of_a_request_that_is_over(rig: Rig) -> None:
    rig.start(beside())
    ended(rig)
    rig.decoder.start(StepOrders(dropped=["d-1"]))
    assert rig.decoder.results().received == {"d-1"}


def test_nor_when_it_is_over_before_its_read_is(rig: Rig) -> None:
    go_on, reached = rig.gates.stop("poll")
    rig.start(beside())
    assert reached.wait(LONG)
    rig.decoder.start(StepOrders(dropped=["d-1"]))
    go_on.set()
    assert rig.results().received == {"d-1"}


def test_the_pieces_before_a_miss_wait_for_the_answer_too() -> None:
    """vLLM keeps what comes before bad blocks, and would go on behind it."""
    rig = Rig(settings=ConnectorSettings(backend="memory", probe=False, piece_bytes=1))
    rig.script.push(ready(rig.card))
    fault = Fault(Cause("forced", "FORCED"), "layers")
    rig.start(replace(order(prefill(((5, 6, 7, 8),), tokens=16), (2, 3, 4, 9)), unanswered=True, fault=fault))
    ended(rig)
    assert not rig.decoder.results().received
    answered(rig, ClaimAnswer("d-1", 20.0))
    results = rig.decoder.results()
    assert results.failed == {"d-1"}
    assert results.bad_blocks < {2, 3, 4, 9}, "some of it may be kept"
    rig.close()


def test_the_record_says_how_long_the_answer_was_waited_for(rig: Rig) -> None:
    rig.start(beside())
    ended(rig)
    waited_from = time.monotonic()
    threading.Event().wait(0.01)
    answered(rig, CONFIRMED)
    least = time.monotonic() - waited_from - 0.002
    rig.results()
    (record,) = eventually(rig.records)
    assert record.state == "done"
    assert list(record.stages) == ["queued", "handshake", "plan", "post", "wire", "claim", "other"]
    assert record.stages["claim"] >= min(least, 0.009)
    moments = [record.moments[name] for name in ("last", "answered", "reported")]
    assert moments == sorted(moments)


def test_an_engine_that_falls_asleep_reports_what_waits_as_lost(rig: Rig) -> None:
    rig.start(beside())
    ended(rig)
    results, outcomes = rig.decoder.retire()
    assert (results.received, results.bad_blocks) == ({"d-1"}, {2, 9})
    assert outcomes.loads["d-1"]
