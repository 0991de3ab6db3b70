"""Loads that begin ahead of the step that orders them, where its scheduler has the worker at hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvd.backends.contract import Transfer
from kvd.worker.cause import Cause
from kvd.worker.orders import ClaimAnswer, LoadOrder, StepOrders
from kvd.worker.step_loads import IDLE_WAIT, NEAR, NEAR_PAST
from tests.support.rigs.bench import eventually, order, prefill, ready
from tests.support.rigs.device import Device
from tests.support.rigs.pull import Rig
from tests.support.rigs.push import PushRig, pushed

FOREVER = 600.0


def pulled(request_id: str = "d-1") -> LoadOrder:
    return order(prefill(((5, 6),)), (2, 9), request_id=request_id)


def test_a_load_begins_before_its_step_does(rig: Rig) -> None:
    assert rig.decoder.begin_ahead(StepOrders(loads=[pulled()]), 0.0)
    assert rig.results().received == {"d-1"}
    assert rig.same((2, 9), (5, 6))


def test_who_asks_before_steps_is_told_whether_there_is_anything_to_ask_for(rig: Rig) -> None:
    decoder = rig.decoder
    expected = [decoder.expects]  # nobody has asked yet
    decoder.complete()
    expected.append(decoder.expects)
    decoder.begin_ahead(StepOrders(loads=[pulled()]), 0.0)
    expected.append(decoder.expects)
    assert eventually(lambda: decoder.complete()[0]) == {"d-1"}
    expected.append(decoder.expects)
    assert expected == [True, False, True, False]


def test_its_step_does_not_begin_it_again(rig: Rig) -> None:
    orders = StepOrders(loads=[pulled()], freed=["p-1"])
    assert rig.decoder.begin_ahead(orders, 0.0)
    begun = rig.decoder.loads.begun["d-1"]
    rig.decoder.bound(orders)
    rig.decoder.start(orders)
    assert rig.decoder.loads.begun["d-1"] is begun
    step = rig.decoder.results()
    assert step.sent == {"p-1"}, "all else is the step's"


def test_it_waits_for_what_earlier_steps_have_queued_and_not_for_its_own(rig: Rig) -> None:
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    orders = StepOrders(loads=[pulled()])
    assert rig.decoder.begin_ahead(orders, 0.0)
    eventually(lambda: device.asked > 3)
    assert rig.untouched(2, 9)
    device.mark()  # what the step itself queues
    rig.decoder.bound(orders)
    rig.decoder.start(orders)
    device.done = 1
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))


@pytest.mark.parametrize(
    ("after", "done", "begins"),
    [
        pytest.param(None, 2, False, id="any step may touch its blocks"),
        pytest.param(None, 3, True, id="all are done"),
        pytest.param(2, 2, False, id="step 2 may"),
        pytest.param(2, 3, True, id="step 2 is done"),
        pytest.param(1, 1, False, id="step 1 may"),
        pytest.param(1, 2, True, id="step 1 is done, step 2 under way"),
        pytest.param(-3, 0, False, id="a step of long ago, and so long the device has done nothing"),
        pytest.param(-3, 1, True, id="a step of long ago"),
    ],
)
def test_a_load_waits_for_the_steps_alone_that_may_touch_its_blocks(
    after: int | None, done: int, begins: bool, rig: Rig
) -> None:
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    for number in (1, 2):  # before step 2 begins the device has step 1 to do
        orders = StepOrders(number=number, marked=True)
        rig.decoder.begin_ahead(orders, 0.0)
        rig.decoder.bound(orders)
        assert device.queued == number, "what is queued before a step is marked once"
    device.done = done
    rig.decoder.begin_ahead(StepOrders(number=3, loads=[replace(pulled(), after=after)]), 0.0)
    if begins:
        assert rig.results().received == {"d-1"}
        assert rig.decoder.loads._gate._thread is None
    else:
        eventually(lambda: device.asked > 3)
        assert rig.untouched(2, 9)
        device.done = 3
        assert rig.results().received == {"d-1"}
    assert rig.same((2, 9), (5, 6))


@pytest.mark.parametrize("last", [1, 999])
def test_marks_of_a_scheduler_before_are_worth_nothing(last: int, rig: Rig) -> None:
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    rig.decoder.bound(StepOrders(number=last, marked=True))
    device.done = device.queued
    rig.decoder.begin_ahead(StepOrders(number=1, marked=True, loads=[replace(pulled(), after=-3)]), 0.0)
    eventually(lambda: device.asked > 3)
    assert rig.untouched(2, 9)
    device.done = device.queued
    assert rig.results().received == {"d-1"}


def test_a_step_that_begins_ahead_is_marked_once_what_it_changes_of_blocks_is_queued(rig: Rig) -> None:
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    orders = StepOrders(number=7, marked=True)
    rig.decoder.begin_ahead(orders, 0.0)
    assert device.queued == 0
    rig.decoder.bound(orders)
    assert device.queued == 1


def test_a_worker_without_a_mark_marks_the_first_step_that_has_a_number(rig: Rig) -> None:
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    for number in (0, 5, 6, 7):
        rig.decoder.bound(StepOrders(number=number))
    assert device.queued == 1
    device.done = 1
    rig.decoder.begin_ahead(StepOrders(number=8, loads=[replace(pulled(), after=4)]), 0.0)
    assert rig.results().received == {"d-1"}
    assert device.queued == 1


@pytest.mark.parametrize(
    ("after", "recorded"),
    [
        pytest.param(1, 0, id="what step 2 was queued behind is known"),
        pytest.param(2, 1, id="of no step after it is it known"),
        pytest.param(None, 1, id="any step may touch its blocks"),
    ],
)
def test_an_event_is_recorded_where_a_load_needs_it(after: int | None, recorded: int, rig: Rig) -> None:
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    rig.decoder.bound(StepOrders(number=2, marked=True))
    before = device.queued
    rig.decoder.bound(StepOrders(number=3))
    assert device.queued == before, "it has no load, and no mark"
    device.done = before + recorded
    orders = StepOrders(number=4, loads=[replace(pulled(), after=after), replace(pulled("d-2"), after=after)])
    rig.decoder.begin_ahead(orders, 0.0)
    assert device.queued == before + recorded, "one for all loads of a step"


def test_an_engine_that_has_time_waits_until_it_is_posted(rig: Rig) -> None:
    rig.decoder.begin_ahead(StepOrders(loads=[pulled()]), FOREVER)
    assert rig.decoder.loads.begun["d-1"].times.posted


def test_the_end_of_a_load_is_told_though_another_has_its_name(rig: Rig) -> None:
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    rig.decoder.begin_ahead(StepOrders(loads=[pulled()]), 0.0)
    first = rig.decoder.loads.begun["d-1"]
    other = order(prefill(((5, 6),)), (3, 4), refused="no")
    rig.decoder.begin_ahead(StepOrders(loads=[other]), 0.0)
    assert rig.decoder.results().failed == {"d-1"}
    assert not rig.decoder.loads.begun
    device.done = device.queued
    eventually(lambda: first.times.ended > 0)
    assert eventually(lambda: rig.decoder.results().received) == {"d-1"}


def test_no_engine_waits_for_a_load_that_has_ended(rig: Rig) -> None:
    refused = order(prefill(((5, 6),)), (2, 9), refused="no")
    assert rig.decoder.begin_ahead(StepOrders(loads=[refused]), FOREVER)
    assert rig.results().failed == {"d-1"}


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_an_engine_waits_no_longer_than_it_may(seconds: float, rig: Rig) -> None:
    release, reached = rig.gates.stop("submit")
    rig.decoder.begin_ahead(StepOrders(loads=[pulled()]), seconds)
    assert not rig.decoder.loads.begun["d-1"].times.posted
    assert reached.wait(FOREVER)
    release.set()
    assert rig.results().failed == set()


def test_a_push_is_announced_and_not_waited_for() -> None:
    pushing = PushRig()
    pushing.decoder.begin_ahead(StepOrders(loads=[pushed((2, 9))]), FOREVER)
    pushing.announced()
    pushing.close()


def test_what_else_a_step_says_of_loads_is_done_ahead_too() -> None:
    """Who waits for a load must not use it against a word of its scheduler that lies there."""
    rig = Rig()
    rig.script.push(ready(rig.card))
    rig.decoder.begin_ahead(StepOrders(loads=[replace(pulled(), unanswered=True)]), FOREVER)
    refusal = ClaimAnswer("d-1", 0.0, Cause("the lease has ended", "LEASE_ENDED"))
    orders = StepOrders(answered=[refusal], freed=["p-1"])
    assert not rig.decoder.begin_ahead(orders, 0.0)
    assert orders == StepOrders(freed=["p-1"])
    assert rig.decoder.complete(FOREVER)[0] == set()
    assert rig.decoder.results().failed == {"d-1"}
    rig.close()


def test_who_asks_early_waits_in_the_place_of_the_step() -> None:
    rig = Rig()
    assert rig.decoder.complete(FOREVER)[0] == set(), "nothing is under way"
    rig.start(pulled())
    began = time.monotonic()
    assert not rig.decoder.results(FOREVER).received
    assert time.monotonic() - began < FOREVER / 2
    rig.script.push(ready(rig.card))
    (asked,) = rig.script.calls
    asked.answer(ready(rig.card))
    assert rig.decoder.complete(FOREVER)[0] == {"d-1"}
    rig.close()


@pytest.mark.parametrize(
    ("due_in", "least", "most"),
    [
        pytest.param(3.0, 0.0, 0.0, id="due later"),
        pytest.param(0.004, IDLE_WAIT, 0.004 + IDLE_WAIT, id="due soon"),
        pytest.param(-3.0, 0.0, 0.0, id="late"),
    ],
)
def test_an_engine_waits_for_what_is_due_soon(due_in: float, least: float, most: float, rig: Rig) -> None:
    with posted(rig) as transfer:
        transfer.due = time.monotonic() + due_in
        # On a machine that stood still for 4 ms it is due now.
        assert least <= rig.decoder.loads.worth_waiting(time.monotonic()) <= most


@pytest.mark.parametrize(
    ("due_in", "waits"),
    [
        pytest.param(3.0, False, id="due later"),
        pytest.param(0.004, False, id="due after the step"),
        pytest.param(0.5 * NEAR, True, id="nearly there"),
        pytest.param(-0.5 * NEAR_PAST, True, id="a little late"),
        pytest.param(-3.0, False, id="late"),
        pytest.param(None, False, id="nobody can tell"),
    ],
)
def test_a_step_with_other_work_is_put_off_for_what_is_nearly_there(
    due_in: float | None, waits: bool, rig: Rig
) -> None:
    now = time.monotonic()
    with posted(rig) as transfer:
        transfer.due = now + due_in if due_in is not None else 0.0
        found = rig.decoder.loads.nearly_there(now)
    assert found == (pytest.approx(max(0.0, due_in or 0.0) + NEAR_PAST) if waits else 0.0)


@contextmanager
def posted(rig: Rig) -> Iterator[Transfer]:
    """A load that is posted, and does not end meanwhile."""
    release, reached = rig.gates.stop("poll")
    rig.start(pulled())
    assert reached.wait(FOREVER)
    (transfer,) = rig.decoder.loads.begun["d-1"].pieces.transfers
    yield transfer
    release.set()
    rig.results()


def test_an_engine_waits_a_moment_for_what_nobody_can_tell_when_it_is_due(rig: Rig) -> None:
    release, reached = rig.gates.stop("poll")
    rig.start(pulled())
    assert rig.decoder.loads.begun["d-1"].under_way.wait(FOREVER)
    assert reached.wait(FOREVER)
    assert rig.decoder.loads.worth_waiting(time.monotonic()) == IDLE_WAIT
    release.set()
    rig.results()


def test_an_engine_waits_for_nothing_that_is_not_posted(rig: Rig) -> None:
    release, reached = rig.gates.stop("submit")
    rig.start(pulled())
    assert reached.wait(FOREVER)
    assert rig.decoder.loads.worth_waiting(time.monotonic()) == 0.0
    release.set()
    rig.results()


def test_orders_that_wait_are_done_by_the_next_step_before_its_own() -> None:
    earlier = StepOrders(freed=["p-1"], declined=[("x", prefill(((5,),)))])
    assert earlier.may_wait
    later = StepOrders(loads=[pulled()], freed=["p-2"])
    later.take_over(earlier)
    assert (later.freed, len(later.declined), len(later.loads)) == (["p-1", "p-2"], 1, 1)
