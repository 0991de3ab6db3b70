"""A claim goes through its states by the table, whatever happens to it in whatever order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.vllm.scheduler.claim import AFTER, ClaimState
from kvd.wire.lease import LeaseRelease
from kvd.worker.cause import Cause
from tests.support.rigs.desk import Desk, claimed

MISSED = Cause("the bytes did not come", "TRANSFER_FAILED")


def answered() -> Desk:
    """A desk whose claim is usable."""
    desk = Desk()
    desk.lease(claimed(20.0))
    desk.advance()
    return desk


def miss(desk: Desk) -> None:
    """Half of what is claimed came."""
    desk.claim.cause, desk.claim.kept = MISSED, desk.claim.tokens // 2


CHANGES: dict[str, Callable[[Desk], object]] = {
    "order": lambda desk: desk.claims.order_load(desk.claim),
    "miss": miss,
    "again": lambda desk: desk.claims.again(desk.claim),
    "end": lambda desk: desk.claims.end(desk.claim, "miss" if desk.claim.cause else "done"),
    "request over": lambda desk: desk.claims.request_over(desk.claim),
}


@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=12))
def test_whatever_happens_in_whatever_order_a_claim_goes_through_its_states_by_the_table(
    changes: list[str],
) -> None:
    desk = answered()
    for name in changes:
        before = desk.claim.state
        refused = ""
        try:
            CHANGES[name](desk)
        except RuntimeError as error:
            refused = str(error)
        now = desk.claim.state
        if refused:
            assert f"is {before.name.lower()} and cannot be" in refused
            assert now is before
            continue
        assert now is before or now in AFTER[before]
        assert bool(desk.script.told(LeaseRelease)) == (now is ClaimState.RELEASED), (
            "released once it is over"
        )


@pytest.mark.parametrize("after", ClaimState)
@pytest.mark.parametrize("before", ClaimState)
def test_it_changes_by_the_table_alone(before: ClaimState, after: ClaimState) -> None:
    claim = answered().claim
    claim.state = before
    if after is before or after in AFTER[before]:
        claim.go(after)
        assert claim.state is after
        return
    wrong = f"^the claim of request r is {before.name.lower()} and cannot be {after.name.lower()}$"
    with pytest.raises(RuntimeError, match=wrong):
        claim.go(after)
    assert claim.state is before
