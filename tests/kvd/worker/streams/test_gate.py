"""Loads wait for their device: what is queued on its stream before a load may zero the blocks that the load fills."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvd.wire.push import PushAnnounce
from kvd.worker import step_loads
from kvd.worker.orders import LoadOrder, StepOrders
from tests.support.no_threads import refuse_threads
from tests.support.rigs.bench import eventually, order, prefill, ready
from tests.support.rigs.device import Device
from tests.support.rigs.pull import Rig
from tests.support.rigs.push import PushRig, pushed


@pytest.fixture
def device(rig: Rig) -> Device:
    """The decoder's."""
    device = Device()
    rig.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    return device


def step(rig: Rig | PushRig, *orders: LoadOrder) -> None:
    """As the connector is called: orders are bound before the forward, loads are started after it."""
    step = StepOrders(loads=list(orders))
    rig.decoder.bound(step)
    rig.decoder.start(step)


def test_a_load_begins_when_its_mark_is_reached(rig: Rig, device: Device) -> None:
    step(rig, order(prefill(((5, 6),)), (2, 9)))
    eventually(lambda: device.asked > 3)
    assert rig.untouched(2, 9)
    assert not rig.decoder.results().received
    device.done = 1
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))


def test_what_the_step_queues_after_the_orders_are_bound_is_not_waited_for(rig: Rig, device: Device) -> None:
    orders = StepOrders(loads=[order(prefill(((5, 6),)), (2, 9))])
    rig.decoder.bound(orders)
    device.mark()  # the forward
    device.done = 1
    rig.decoder.start(orders)
    assert rig.results().failed == set()


def test_a_step_without_loads_makes_no_mark(rig: Rig, device: Device) -> None:
    step(rig)
    assert device.queued == 0
    assert rig.decoder.loads._gate._thread is None


def test_where_the_system_starts_no_thread_a_load_that_must_wait_is_a_miss(
    rig: Rig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "kvd-gate")
    step(rig, order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == {"d-1"}
    assert "waits for the device: RuntimeError" in rig.causes()["d-1"]
    monkeypatch.undo()
    step(rig, order(prefill(((5, 6),)), (2, 9), request_id="d-2"))
    device.done = device.queued
    assert rig.results().failed == set()


def test_where_the_device_is_never_behind_there_is_no_gate(rig: Rig) -> None:
    step(rig, order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == set()
    assert rig.decoder.loads._gate._thread is None


def test_an_idle_device_is_given_the_moment_that_it_takes_to_come_to_a_mark(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loads, "PATIENCE", 10.0)

    def soon() -> Callable[[], bool]:
        looks = iter((False, False, True))
        return lambda: next(looks)

    rig.decoder.loads._record_event = soon
    orders = StepOrders(loads=[order(prefill(((5, 6),)), (2, 9))], idle=True)
    rig.decoder.bound(orders)
    rig.decoder.start(orders)
    assert rig.results().failed == set()
    assert rig.decoder.loads._gate._thread is None


def test_a_step_that_computes_does_not_wait_for_its_device(rig: Rig, device: Device) -> None:
    step(rig, order(prefill(((5, 6),)), (2, 9)))
    assert rig.decoder.loads._gate._thread is not None
    device.done = 1
    assert rig.results().failed == set()


@pytest.mark.usefixtures("device")
def test_a_load_whose_device_does_not_come_so_far_in_time_is_a_miss(rig: Rig) -> None:
    late = order(prefill(((5, 6),)), (2, 9))
    rig.decoder.bound(StepOrders(loads=[late]))
    rig.decoder.start(StepOrders(loads=[late]))
    rig.decoder.loads.begun["d-1"].deadline = time.monotonic()
    assert rig.results().failed == {"d-1"}
    assert "the device was busy" in rig.causes()["d-1"]
    assert rig.untouched(2, 9)


def test_a_device_that_cannot_be_asked_is_a_miss(rig: Rig, device: Device) -> None:
    device.broken = True
    step(rig, order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == {"d-1"}
    assert "illegal memory access" in rig.causes()["d-1"]


def test_closing_refuses_what_waits_for_the_device(device: Device, rig: Rig) -> None:
    rig.script.push(ready(rig.card))
    step(rig, order(prefill(((5, 6),)), (2, 9)))
    eventually(lambda: device.asked)
    rig.decoder.close()
    assert rig.decoder.results().failed == {"d-1"}


@pytest.fixture
def pushing() -> Iterator[PushRig]:
    made = PushRig()
    yield made
    made.close()


def test_a_push_is_announced_when_its_mark_is_reached(pushing: PushRig) -> None:
    device = Device()
    pushing.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    step(pushing, pushed((2, 9)))
    eventually(lambda: device.asked > 3)
    assert pushing.script.told(PushAnnounce) == []
    device.done = 1
    pushing.announced()


def test_a_push_that_is_dropped_before_its_mark_is_reached_is_declined(pushing: PushRig) -> None:
    device = Device()
    pushing.decoder.loads._record_event = device.mark  # type: ignore[assignment]
    step(pushing, pushed((2, 9)))
    pushing.decoder.start(StepOrders(dropped=["d-1"]))
    assert pushing.results().failed == {"d-1"}
    assert pushing.script.told(PushAnnounce) == []
    assert [word.key.transfer_id for word in pushing.withdrawn()] == ["x"]
