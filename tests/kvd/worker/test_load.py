"""How the claim of a load may come to stand: what follows what, and what becomes known with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.worker.cause import Cause
from kvd.worker.load import FOLLOWS, Standing, load_of
from tests.support.rigs.bench import order, prefill

LATE = Cause("the lease ended", "LEASE_ENDED")
ORDER = order(prefill(((5, 6),)), (2, 9))


def test_a_load_whose_claim_was_answered_before_it_began_stands_confirmed() -> None:
    load = load_of(ORDER, 10.0)
    assert (load.claim.standing, load.times.received, load.deadline) == (
        Standing.CONFIRMED,
        10.0,
        10.0 + ORDER.seconds,
    )


@pytest.mark.parametrize("after", Standing)
@pytest.mark.parametrize("before", Standing)
def test_a_claim_changes_by_the_table_alone(before: Standing, after: Standing) -> None:
    load = load_of(replace(ORDER, unanswered=True), 10.0)
    if before is not Standing.OPEN:
        assert load.claim.stands(before, LATE if before is Standing.REFUSED else None)
    had = (load.claim.standing, load.claim.answered, load.claim.refused)
    changed = load.claim.stands(after, LATE if after is Standing.REFUSED else None)
    assert changed == (after in FOLLOWS[before])
    if changed:
        assert (load.claim.standing, load.claim.refused) == (
            after,
            LATE if after is Standing.REFUSED else None,
        )
    else:
        assert (load.claim.standing, load.claim.answered, load.claim.refused) == had


@pytest.mark.parametrize("answer", [Standing.CONFIRMED, Standing.REFUSED])
def test_the_time_of_an_answer_is_of_the_first(answer: Standing) -> None:
    load = load_of(replace(ORDER, unanswered=True), 10.0)
    load.claim.stands(answer)
    first = load.claim.answered
    assert first > 0
    load.claim.stands(Standing.REFUSED, LATE)
    assert load.claim.answered == first


def test_whoever_goes_without_an_answer_was_given_none() -> None:
    load = load_of(replace(ORDER, unanswered=True), 10.0)
    load.claim.stands(Standing.FORGONE)
    assert load.claim.answered == 0.0


def test_the_first_reason_to_drop_a_load_counts() -> None:
    load = load_of(ORDER, 10.0)
    load.drop(LATE)
    load.drop(Cause("another", "FORCED"))
    assert load.dropped == LATE
