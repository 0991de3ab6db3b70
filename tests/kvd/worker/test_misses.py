"""What an operator's order does to a load on a worker: it misses by the way of every other miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.geometry.rank import Rank
from kvd.wire.push import PushAnnounce
from kvd.worker.orders import Fault, StepOrders
from kvd.worker.push import receiver as arriving
from tests.support.rigs.bench import eventually, order, prefill, why
from tests.support.rigs.pull import Rig
from tests.support.rigs.push import PushRig, pushed

CAUSE = "forced by uid 0, pid 1, order o1"
BEFORE, FLIGHT, LAYERS = (
    Fault(why(CAUSE), "before"),
    Fault(why(CAUSE), "flight"),
    Fault(why(CAUSE), "layers"),
)


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushRig]:
    """One worker on each side; the sources may take as long as they like to fall quiet."""
    monkeypatch.setattr(arriving, "QUIESCE_SECONDS", 600.0)
    made = PushRig()
    yield made
    made.close()


# --- whom it concerns ---


def test_a_fault_concerns_the_worker_that_it_names_or_that_holds_what_it_names(rig: Rig) -> None:
    geometry = rig.decoder.geometry
    assert FLIGHT.concerns(geometry)
    assert replace(FLIGHT, rank=Rank(0)).concerns(geometry)
    assert not replace(FLIGHT, rank=Rank(1)).concerns(geometry)
    assert FLIGHT.withheld(geometry) == set()
    assert replace(LAYERS, layer="l1").withheld(geometry) == {"l1"}
    assert replace(LAYERS, group=0).withheld(geometry) == {"l0", "l1"}
    assert not replace(LAYERS, layer="l7").concerns(geometry)
    assert not replace(LAYERS, group=1).concerns(geometry)


# --- pull ---


def missed(rig: Rig) -> None:
    """The load is reported with its cause, and it left no lane behind that could still write."""
    results = rig.results()
    assert (results.received, results.failed, results.bad_blocks) == ({"d-1"}, {"d-1"}, {2, 9})
    outcomes = rig.decoder.outcomes()
    assert outcomes is not None
    assert outcomes.loads == {"d-1": why(CAUSE)}
    assert outcomes.quiesced["d-1"] > 0
    (record,) = eventually(rig.records)
    assert (record.state, record.cause) == ("miss", CAUSE)


def test_before_nothing_is_read(rig: Rig) -> None:
    rig.start(replace(order(prefill(((5, 6),)), (2, 9)), fault=BEFORE))
    missed(rig)
    assert rig.untouched(2, 9)


def test_in_flight_the_lane_is_destroyed_before_the_report(rig: Rig) -> None:
    rig.faults.late.add(0)
    rig.start(replace(order(prefill(((5, 6),)), (2, 9)), fault=FLIGHT))
    missed(rig)
    assert rig.gates.closed == 1
    rig.faults.release(0)
    assert rig.untouched(2, 9), "its bytes cannot land any more"


def test_after_a_part_half_of_the_bytes_are_there_and_it_misses_all_the_same(rig: Rig) -> None:
    rig.start(replace(order(prefill(((5, 6),)), (2, 9)), fault=LAYERS))
    missed(rig)
    assert rig.gates.closed == 1
    assert not rig.untouched(2, 9)
    assert not rig.same((2, 9), (5, 6))


def test_all_but_the_named_layer_arrives(rig: Rig) -> None:
    rig.start(replace(order(prefill(((5, 6),)), (2, 9)), fault=replace(LAYERS, layer="l1")))
    missed(rig)
    first, second = (rig.blocks(rig.target, layer, 2, 9) for layer in (0, 1))
    assert (first == rig.blocks(rig.source, 0, 5, 6)).all()
    assert not second.any()


def test_without_the_only_group_nothing_arrives(rig: Rig) -> None:
    rig.start(replace(order(prefill(((5, 6),)), (2, 9)), fault=replace(LAYERS, group=0)))
    missed(rig)
    assert rig.untouched(2, 9)


def test_a_worker_that_is_not_meant_loads_as_ever(rig: Rig) -> None:
    rig.start(replace(order(prefill(((5, 6),)), (2, 9)), fault=replace(BEFORE, rank=Rank(1))))
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))


def test_a_load_under_way_is_given_up_and_others_start_over(rig: Rig) -> None:
    rig.faults.hold.update((0, 1))
    rig.start(order(prefill(((5, 6),)), (2, 9)), order(prefill(((7,),)), (3,), request_id="d-2"))
    thread = rig.decoder._peers.pull_threads["p"]
    eventually(lambda: len(thread._active) == 2)
    rig.decoder.start(StepOrders(faults=[("d-1", FLIGHT)]))
    results = rig.results(2)
    assert (results.received, results.failed) == ({"d-1", "d-2"}, {"d-1"})
    assert rig.causes() == {"d-1": CAUSE, "d-2": ""}
    assert rig.untouched(2, 9)
    assert rig.same((3,), (7,))


def test_an_order_for_a_load_that_is_complete_or_unknown_changes_nothing(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    thread = rig.decoder._peers.pull_threads["p"]
    eventually(lambda: not rig.decoder._ends._ended.empty())
    rig.decoder.start(StepOrders(faults=[("d-1", FLIGHT), ("d-9", FLIGHT)]))
    eventually(lambda: thread._thread.idle)
    assert rig.results().failed == set()
    assert rig.gates.closed == 0


# --- push ---


def test_before_a_push_is_announced_its_prefiller_is_told_not_to_wait(push: PushRig) -> None:
    push.start(replace(pushed((2, 9)), fault=BEFORE))
    assert push.results().failed == {"d-1"}
    assert push.script.told(PushAnnounce) == []
    assert push.withdrawn()[0].key.transfer_id == "x"
    assert push.causes() == {"d-1": CAUSE}


def test_a_push_is_given_up_once_the_prefiller_has_taken_the_announcement(push: PushRig) -> None:
    push.start(replace(pushed((2, 9)), fault=FLIGHT))
    push.announced()
    assert not push.decoder.results().received
    push.answer()
    push.withdrawn()
    assert not push.decoder.results().received, "something may still land"
    push.say(quiesced=True)
    assert push.results().failed == {"d-1"}
    assert push.causes() == {"d-1": CAUSE}


def test_a_push_is_given_up_after_its_first_layer(push: PushRig) -> None:
    push.start(replace(pushed((2, 9)), fault=LAYERS))
    (told,) = push.announced()
    push.answer()
    push.write("l0", told, (5, 6))
    push.withdrawn()
    push.say(quiesced=True)
    assert push.results().failed == {"d-1"}


@pytest.mark.parametrize("layer", ["l0", "l1"])
def test_a_push_is_given_up_when_all_but_the_named_layer_is_there(push: PushRig, layer: str) -> None:
    push.start(replace(pushed((2, 9)), fault=replace(LAYERS, layer=layer)))
    (told,) = push.announced()
    push.answer()
    push.write("l0", told, (5, 6))
    push.write("l1", told, (5, 6))
    push.withdrawn()
    push.say(quiesced=True)
    assert push.results().failed == {"d-1"}


def test_a_push_under_way_is_given_up_at_once_or_at_the_next_layer(push: PushRig) -> None:
    for number, fault in enumerate((FLIGHT, LAYERS)):
        name = f"d-{number}"
        push.start(pushed((2, 9), name=name, request_id=name))
        told = push.announced(number + 1)[-1]
        push.answer()
        push.decoder.start(StepOrders(faults=[(name, fault)]))
        if fault is LAYERS:
            push.write("l0", told, (5, 6))
        push.withdrawn(number + 1)
        push.say(quiesced=True, name=name)
        assert push.results().failed == {name}
        assert push.causes() == {name: CAUSE}
