"""Loads that the step which orders them uses: who posts them, when they stand, and what becomes of misses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvd.backends.contract import State, Transfer
from kvd.backends.errors import BackendError
from kvd.backends.memory import MemoryLane
from kvd.worker import in_step
from kvd.worker.cause import Cause, code_of
from kvd.worker.in_step import NOT_POSTED
from kvd.worker.load import Load
from kvd.worker.orders import ClaimAnswer, Fault, LoadOrder, StepOrders, StepOutcomes
from kvd.worker.peer_threads import PeerThreads
from kvd.worker.peers.held import Evict
from kvd.worker.pull import pieces
from kvd.worker.pull.reader import LANE_GONE
from kvd.worker.reporting import Results
from tests.support.rigs.bench import eventually, order, prefill, ready
from tests.support.rigs.device import Device
from tests.support.rigs.pull import Rig, SlowLane

LONG = 30.0
STREAM = 77
CONFIRMED = ClaimAnswer("d-1", 20.0)
REFUSED = ClaimAnswer("d-1", 0.0, Cause("the lease has ended", "LEASE_ENDED"))
ORDERED = Cause("an operator wants it to miss", "FORCED")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Its decoder's lane is there, and the lane's thread has nothing to do."""
    made = Rig(stream_of=lambda: STREAM)
    made.script.push(ready(made.card))
    made.asleep()
    yield made
    made.close()


def used(request_id: str = "d-1", theirs: tuple[int, ...] = (5, 6), **changes: Any) -> LoadOrder:
    """A load into blocks 2 and 9, or as many of them, that its own step uses."""
    remote = prefill((theirs,), tokens=4 * len(theirs))
    return replace(
        order(remote, (2, 9)[: len(theirs)], request_id=request_id), **{"in_step": True, **changes}
    )


def beside(request_id: str = "other") -> LoadOrder:
    """Another load, of block 3, that comes between steps."""
    return order(prefill(((7,),), tokens=4), (3,), request_id=request_id)


def stands(rig: Rig, request_id: str = "d-1") -> bool:
    return rig.decoder.in_step.stands(request_id)


def load_of(rig: Rig, request_id: str = "d-1") -> Load:
    return rig.decoder.loads.begun[request_id]


def settled(rig: Rig, *request_ids: str) -> dict[str, Cause | None]:
    """The step is over: what became of its loads."""
    found = StepOutcomes()

    def look() -> bool:
        for request_id in request_ids:
            rig.decoder.in_step.let_go(request_id)
        nonlocal found
        found = found.merge(rig.decoder.in_step.ended(0.01))
        return set(request_ids) <= set(found.loads)

    eventually(look)
    return found.loads


# --- as the step is queued ---


def test_it_is_posted_on_the_thread_of_the_step_and_there_when_the_step_is_queued(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted_on: list[threading.Thread] = []
    submit = MemoryLane.submit

    def submitting(lane: MemoryLane, *arguments: Any) -> Transfer:
        posted_on.append(threading.current_thread())
        return submit(lane, *arguments)

    monkeypatch.setattr(MemoryLane, "submit", submitting)
    rig.start(used())
    assert rig.same((2, 9), (5, 6))
    assert posted_on == [threading.current_thread()]
    assert rig.gates.streams == [STREAM]
    assert stands(rig)


def test_it_may_begin_ahead_of_its_step_which_runs_behind_it_all_the_same(rig: Rig) -> None:
    orders = StepOrders(loads=[used()])
    assert rig.decoder.begin_ahead(orders, 0.0)
    assert load_of(rig).under_way.is_set()
    assert rig.gates.streams == [], "what is queued until then need not wait"
    rig.decoder.start(orders)
    assert rig.gates.streams == [STREAM]
    assert rig.same((2, 9), (5, 6))


def test_a_step_waits_for_the_lanes_thread_to_post_it_where_that_is_at_work(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_step, "JOIN_SECONDS", LONG)
    go_on, reached = rig.gates.stop("submit")
    rig.start(beside())
    assert reached.wait(LONG)
    begin = PeerThreads.begin

    def beginning(threads: PeerThreads, load: Load) -> Cause | None:
        cause = begin(threads, load)
        go_on.set()
        return cause

    monkeypatch.setattr(PeerThreads, "begin", beginning)
    rig.start(used())
    assert rig.same((2, 9), (5, 6))
    assert rig.gates.streams == [STREAM]
    assert stands(rig)
    assert rig.results().received == {"other"}


def test_one_that_the_lanes_thread_cannot_post_in_time_is_a_miss_and_never_lands(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_step, "JOIN_SECONDS", 0.01)
    go_on, reached = rig.gates.stop("submit")
    rig.start(beside())
    assert reached.wait(LONG)
    rig.start(used())
    assert not stands(rig)
    assert rig.decoder.in_step.ended(LONG).loads == {"d-1": NOT_POSTED}
    go_on.set()
    assert rig.results().received == {"other"}
    rig.asleep()
    assert rig.untouched(2, 9)
    assert rig.gates.streams == []


def test_one_whose_blocks_earlier_steps_still_have_is_a_miss_and_never_lands(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_step, "JOIN_SECONDS", 0.01)
    device, orders = Device(), StepOrders(loads=[used()])
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    rig.decoder.bound(orders)
    rig.decoder.start(orders)
    assert rig.decoder.in_step.ended(LONG).loads == {"d-1": NOT_POSTED}
    device.done = device.queued
    rig.start(beside())
    assert rig.results().received == {"other"}
    assert rig.untouched(2, 9)


# --- whether it stands ---


def test_it_stands_only_when_all_of_it_is_here(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(used())
    assert not stands(rig)
    rig.faults.release(0)
    assert stands(rig)
    assert not stands(rig, "another")


def test_it_stands_only_when_its_claim_is_confirmed(rig: Rig) -> None:
    rig.start(used(unanswered=True))
    assert rig.same((2, 9), (5, 6))
    assert not stands(rig)
    rig.decoder.in_step.answered([CONFIRMED])
    assert stands(rig)
    assert settled(rig, "d-1") == {"d-1": None}


def test_one_whose_claim_is_refused_is_a_miss(rig: Rig) -> None:
    rig.start(used(unanswered=True))
    rig.decoder.in_step.answered([REFUSED])
    assert not stands(rig)
    assert settled(rig, "d-1") == {"d-1": REFUSED.refused}


def test_a_step_may_say_how_its_claim_was_answered(rig: Rig) -> None:
    rig.start(used(unanswered=True))
    rig.decoder.start(StepOrders(answered=[CONFIRMED]))
    assert stands(rig)


@pytest.mark.parametrize("when", ["before", "flight", "layers"])
def test_one_that_is_to_miss_does(when: Any, rig: Rig) -> None:
    rig.start(used(fault=Fault(ORDERED, when)))
    assert not stands(rig)
    assert settled(rig, "d-1") == {"d-1": ORDERED}


def test_one_that_comes_too_late_is_a_miss(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(used())
    rig.expire("d-1")
    rig.faults.release(0)
    assert not stands(rig)
    outcome = settled(rig, "d-1")["d-1"]
    assert code_of(outcome) == "TOO_LATE"


def test_one_whose_step_the_device_does_not_put_behind_it_is_a_miss(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise BackendError("the device would not wait")

    monkeypatch.setattr(SlowLane, "precede", refusing)
    rig.faults.hold = {0}
    rig.start(used())
    assert not stands(rig)
    assert settled(rig, "d-1") == {"d-1": Cause("the device would not wait", "TRANSFER_FAILED")}
    assert rig.gates.closed == 1, "or it might land in blocks that are another request's"


def test_a_load_that_nobody_uses_any_more_ends(rig: Rig) -> None:
    rig.start(used(unanswered=True))
    rig.decoder.in_step.drop("d-1")
    assert not stands(rig)
    assert set(settled(rig, "d-1")) == {"d-1"}
    rig.decoder.in_step.drop("d-1")


# --- misses ---


@pytest.mark.parametrize("within", [True, False], ids=["in-step", "between-steps"])
def test_a_load_that_fails_is_read_again_unless_a_step_runs_behind_it(within: bool, rig: Rig) -> None:
    rig.faults.fail_after = {0: 0}
    rig.start(used(in_step=within))
    if within:
        outcome = settled(rig, "d-1")["d-1"]
        assert outcome is not None
        assert outcome.text.endswith("submit 0 is to fail half-way")
        assert rig.untouched(2, 9)
    else:
        assert rig.results() == Results(received={"d-1"})
        assert rig.same((2, 9), (5, 6))
    assert next(rig.backend._inner.submits) == (1 if within else 2)


@pytest.mark.parametrize("within", [True, False], ids=["in-step", "between-steps"])
def test_a_load_whose_lane_is_closed_for_another_is_read_again_unless_a_step_runs_behind_it(
    within: bool, rig: Rig
) -> None:
    rig.faults.hold, rig.faults.fail_after = {0}, {1: 0}
    rig.start(used(in_step=within))
    assert load_of(rig).under_way.wait(LONG)
    rig.start(beside())
    if within:
        assert rig.results().received == {"other"}
        assert settled(rig, "d-1") == {"d-1": LANE_GONE}
        assert rig.untouched(2, 9)
    else:
        assert rig.results(2) == Results(received={"d-1", "other"})
        assert rig.same((2, 9), (5, 6))
    assert next(rig.backend._inner.submits) == (3 if within else 4)


def test_what_could_not_be_posted_is_posted_on_a_new_lane(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step runs behind anything of it yet."""
    monkeypatch.setattr(in_step, "JOIN_SECONDS", LONG)
    rig.faults.refuse = {0}
    rig.start(used())
    assert rig.gates.opened == 2
    assert rig.same((2, 9), (5, 6))
    assert stands(rig)


# --- what is told ---


def test_what_became_of_them_is_told_once_and_vllm_hears_nothing(rig: Rig) -> None:
    rig.start(used("good", (5,)), used("bad", (6,), unanswered=True))
    rig.decoder.in_step.answered([replace(REFUSED, request_id="bad")])
    for request_id in ("good", "bad"):
        rig.decoder.in_step.let_go(request_id)
    eventually(lambda: rig.decoder._ends._ended.qsize() == 2)
    assert rig.decoder.complete() == (set(), StepOutcomes())
    assert rig.decoder.results() == Results()
    assert rig.decoder.outcomes() is None
    told = rig.decoder.in_step.ended(0.0)
    assert told.loads == {"good": None, "bad": REFUSED.refused}
    assert set(told.quiesced) == {"good", "bad"}
    assert rig.decoder.in_step.ended(0.0) == StepOutcomes()
    assert not stands(rig, "good"), "that was said"


def test_the_ledger_has_them(rig: Rig) -> None:
    rig.start(used("good", (5,)), used("bad", (6,), unanswered=True))
    rig.decoder.in_step.answered([replace(REFUSED, request_id="bad")])
    settled(rig, "good", "bad")
    records = eventually(lambda: found if len(found := rig.records()) == 2 else [])
    assert {record.request_id: record.state for record in records} == {"good": "done", "bad": "miss"}


def test_no_engine_without_other_work_waits_for_them(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(used())
    (transfer,) = load_of(rig).pieces.transfers
    assert transfer.state is State.PENDING
    now = time.monotonic()
    for due in (0.0, now, now + 1e-4):
        transfer.due = due
        assert rig.decoder.loads.worth_waiting(now) == rig.decoder.loads.nearly_there(now) == 0.0


# --- which loads suit ---


def takes(rig: Rig, most_seconds: float = 1.0, **remote: Any) -> bool:
    return rig.decoder.in_step.takes(prefill(((5, 6),), **remote), 8, most_seconds)


def test_a_load_over_a_lane_that_stands_suits(rig: Rig) -> None:
    assert takes(rig)
    assert not takes(rig, engine_id="q"), "a peer that is not known"
    assert not takes(rig, generation="gen-2"), "nor is that one of it"


def test_none_suits_where_memory_has_no_streams() -> None:
    rig = Rig()
    rig.script.push(ready(rig.card))
    rig.asleep()
    assert not takes(rig)
    rig.close()


def test_none_suits_whose_lane_orders_no_streams(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SlowLane, "precede")
    assert not takes(rig)


def test_none_suits_without_a_lane(rig: Rig) -> None:
    rig.decoder._peers.evict("p", Evict("", None))
    eventually(lambda: rig.gates.closed)
    assert not takes(rig)
    rig.start(beside())
    assert rig.results().received == {"other"}
    assert takes(rig), "the first load made another one"


def test_none_suits_beside_a_lane_that_could_not_be_closed(rig: Rig) -> None:
    rig.gates.close_errors.append(BackendError("something holds the agent"))
    rig.decoder._peers.evict("p", Evict("", None))
    assert rig.gates.close_tried.wait(LONG)
    rig.start(beside())
    assert rig.results().received == {"other"}
    assert not takes(rig)


def test_before_a_load_told_of_its_lane_a_probe_or_a_modest_rate_does(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert takes(rig, 1e-3)
    monkeypatch.setattr(in_step, "UNKNOWN_RATE", 1e3)
    assert not takes(rig, 1e-3)
    rig.decoder._peers.pull_threads["p"].probing.rate = 50e9
    assert takes(rig, 1e-3)


def test_none_suits_that_takes_longer_by_the_pace_of_the_last_large_load(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = MemoryLane.submit

    def submitting(lane: MemoryLane, *arguments: Any) -> Transfer:
        transfer = submit(lane, *arguments)
        transfer.detail["device_seconds"] = 0.2
        return transfer

    monkeypatch.setattr(MemoryLane, "submit", submitting)
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    assert takes(rig, 0.19), "so short a load says nothing"
    monkeypatch.setattr(pieces, "TELLING", 0)
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    assert takes(rig, 0.21)
    assert not takes(rig, 0.19)
    monkeypatch.setattr(pieces, "TELLING", 1 << 20)
    rig.start(beside())
    rig.results()
    assert not takes(rig, 0.19), "one that says nothing changes nothing"
