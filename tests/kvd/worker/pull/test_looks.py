"""When the thread of a lane looks again: soon at what somebody waits for, late at what its own step uses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.backends.contract import Transfer
from kvd.worker.later import LATER_SECONDS
from kvd.worker.load import Load, LoadPiece, load_of
from kvd.worker.pull.looks import (
    DUE_FOR,
    EARLY,
    FAST_FOR,
    LONGEST,
    POLL_DUE,
    POLL_FAST,
    POLL_SLOW,
    next_look,
)
from tests.support.rigs.bench import order, prefill

NOW = 1000.0
YOUNG, OLD = NOW - FAST_FOR / 2, NOW - 2 * FAST_FOR


def posted(at: float, due: float = 0.0, *, in_step: bool = False) -> Load:
    """A load that was posted then, in one transfer."""
    load = load_of(replace(order(prefill(((5, 6),)), (2, 9)), in_step=in_step), at)
    load.times.posted = at
    load.pieces.all = [LoadPiece(0, 8, {}, [Transfer("p", 64, 1, None, due=due)])]
    return load


def seconds(*active: Load) -> float:
    return next_look(active, NOW, probing=False, probe_posted=0.0)


def test_a_young_load_is_looked_at_often_and_an_old_one_less() -> None:
    assert seconds(posted(YOUNG)) == POLL_FAST
    assert seconds(posted(OLD)) == POLL_SLOW


def test_the_youngest_load_counts() -> None:
    assert seconds(posted(OLD), posted(YOUNG)) == POLL_FAST


@pytest.mark.parametrize(
    ("due_in", "wanted"),
    [
        pytest.param(1.0, LONGEST, id="a lane that is wrong by far is not trusted"),
        pytest.param(0.004, 0.004 - EARLY, id="shortly before"),
        pytest.param(EARLY / 2, POLL_DUE, id="about to end"),
        pytest.param(-DUE_FOR / 2, POLL_DUE, id="a little late"),
        pytest.param(-2 * DUE_FOR, POLL_SLOW, id="late: as any other"),
    ],
)
def test_a_load_is_looked_at_when_it_is_due(due_in: float, wanted: float) -> None:
    assert seconds(posted(OLD, NOW + due_in)) == pytest.approx(wanted)


def test_the_first_one_that_is_due_counts() -> None:
    assert seconds(posted(OLD, NOW + 0.004), posted(OLD, NOW + 0.003)) == pytest.approx(0.003 - EARLY)


def test_nobody_knows_when_the_first_is_due_where_one_is_not_known() -> None:
    assert seconds(posted(OLD, NOW + 0.004), posted(OLD)) == POLL_SLOW


def test_a_load_that_its_own_step_uses_is_left_to_the_step() -> None:
    assert seconds(posted(NOW, in_step=True)) == LATER_SECONDS
    assert seconds(posted(NOW, NOW + 0.001, in_step=True)) == LATER_SECONDS


def test_after_that_step_it_is_looked_at_as_any_other() -> None:
    assert seconds(posted(NOW - 1.1 * LATER_SECONDS, in_step=True)) == POLL_FAST
    assert seconds(posted(OLD, in_step=True)) == POLL_SLOW
    assert seconds(posted(OLD, NOW + 0.004, in_step=True)) == pytest.approx(0.004 - EARLY)


def test_beside_it_others_are_looked_at_as_if_it_were_not_there() -> None:
    beside = posted(NOW, NOW + 0.001, in_step=True)
    assert seconds(beside, posted(OLD)) == POLL_SLOW
    assert seconds(beside, posted(OLD, NOW + 0.004)) == pytest.approx(0.004 - EARLY)


@pytest.mark.parametrize(("probe_posted", "wanted"), [(YOUNG, POLL_FAST), (OLD, POLL_SLOW)])
@pytest.mark.parametrize(
    "active",
    [
        pytest.param((), id="alone"),
        pytest.param((posted(NOW, in_step=True),), id="beside a load of a step"),
        pytest.param((posted(OLD, NOW + 0.004),), id="beside a load that is due later"),
    ],
)
def test_a_probe_is_looked_at_by_its_age_whatever_is_due(
    active: tuple[Load, ...], probe_posted: float, wanted: float
) -> None:
    assert next_look(active, NOW, probing=True, probe_posted=probe_posted) == wanted
