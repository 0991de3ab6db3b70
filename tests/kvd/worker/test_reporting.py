"""What a worker tells with a step, and what it leaves to who asks before the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.worker.cause import Cause
from kvd.worker.load import Load, load_of
from kvd.worker.orders import StepOutcomes
from kvd.worker.reporting import Reporting, Results
from tests.support.rigs.bench import eventually, order, prefill, ready
from tests.support.rigs.pull import Rig

GONE = Cause("the peer is gone", "PEER_GONE")


def ended(cause: Cause | None = None) -> Load:
    load = load_of(order(prefill(((5, 6),)), (2, 9)), 10.0)
    load.end(cause)
    return load


def test_a_step_tells_of_complete_loads_where_nobody_asks_early() -> None:
    reporting = Reporting()
    held = reporting.hold()
    reporting.note(ended())
    assert reporting.tell(held).received == {"d-1"}
    assert reporting.outcomes().loads == {"d-1": None}
    assert reporting.tell(reporting.hold()) == Results()


def test_who_asks_early_gets_them_once() -> None:
    reporting = Reporting()
    reporting.note(ended())
    received, outcomes = reporting.tell_early()
    assert (received, outcomes.loads) == ({"d-1"}, {"d-1": None})
    assert outcomes.quiesced["d-1"] > 0
    assert reporting.tell_early() == (set(), StepOutcomes())
    assert reporting.tell(reporting.hold()) == Results()
    assert reporting.outcomes() == StepOutcomes()


def test_who_asks_early_need_not_ask_for_nothing() -> None:
    reporting = Reporting()
    expected = [reporting.expects]  # nobody has asked yet, and the steps would tell
    for happens in (
        reporting.tell_early,
        lambda: reporting.note(ended(GONE)),  # the step's to tell
        lambda: reporting.note(ended()),
        reporting.tell_early,
    ):
        happens()
        expected.append(reporting.expects)
    assert expected == [True, False, False, True, False]


def test_the_step_leaves_them_to_who_asks_early_and_tells_them_one_later() -> None:
    reporting = Reporting()
    reporting.tell_early()
    held = reporting.hold()
    reporting.note(ended())
    assert reporting.tell(held) == Results()
    assert reporting.tell(reporting.hold()).received == {"d-1"}, "nobody asked meanwhile"


def test_a_miss_is_told_with_the_step_alone() -> None:
    reporting = Reporting()
    reporting.tell_early()
    reporting.note(ended(GONE))
    assert reporting.tell_early() == (set(), StepOutcomes())
    results = reporting.tell(reporting.hold())
    assert (results.received, results.failed, results.lost_blocks) == ({"d-1"}, {"d-1"}, {2, 9})
    assert reporting.outcomes().loads == {"d-1": GONE}


# --- of a worker ---


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.script.push(ready(made.card))
    yield made
    made.close()


def test_a_worker_tells_of_a_complete_load_before_the_next_step(rig: Rig) -> None:
    assert rig.decoder.complete() == (set(), StepOutcomes())
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    eventually(lambda: not rig.decoder._ends._ended.empty())
    received, outcomes = rig.decoder.complete()
    assert (received, outcomes.loads) == ({"d-1"}, {"d-1": None})
    assert rig.same((2, 9), (5, 6))
    assert rig.decoder.results() == Results()


def test_a_step_leaves_it_to_who_asks_before_steps_and_waits_there(rig: Rig) -> None:
    rig.decoder.complete()
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.decoder.results(30.0) == Results()
    assert rig.decoder.complete(30.0)[0] == {"d-1"}


def test_what_reads_cost_is_told_once_also_without_loads() -> None:
    reporting = Reporting()
    assert reporting.outcomes(0.02) == StepOutcomes(read_cost=0.02)
    assert reporting.outcomes() == StepOutcomes()
