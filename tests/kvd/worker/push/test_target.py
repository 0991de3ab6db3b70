"""A target goes to its end by the table of its phases, whatever happens to it in whatever order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint
from kvd.wire.push import PushKey
from kvd.worker.cause import Cause
from kvd.worker.push.target import AFTER, PushTarget, TargetPhase, nothing, release_at

KEY = PushKey(transfer_id="x", prefiller="p", prefiller_endpoint=Endpoint(), decoder="d", rank=Rank(0))
GIVEN_UP = Cause("its blocks do not fit", "DOES_NOT_FIT")


def made() -> PushTarget:
    return PushTarget(nothing(KEY), 30.0)


CHANGES: dict[str, Callable[[PushTarget], None]] = {
    "close": lambda target: target.close(),
    "fail": lambda target: target.close(GIVEN_UP),
    "withdraw": lambda target: target.withdraw(),
    "settle": lambda target: target.settle(),
    "release": lambda target: target.release(),
    "lose posts": lambda target: target.lose_posts(),
}


@given(changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=12))
def test_whatever_happens_in_whatever_order_a_target_goes_through_its_phases_by_the_table(
    changes: list[str],
) -> None:
    target = made()
    for name in changes:
        before, cause = target.phase, target.cause
        refused = ""
        try:
            CHANGES[name](target)
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert f"is {before.name.lower()} and cannot be" in refused
            assert target.phase is before
            continue
        assert target.phase is before or target.phase in AFTER[before]
        assert target.phase >= before
        assert target.cause in (cause, GIVEN_UP)
        assert target.cause is cause or before is TargetPhase.SENDING, "what became of it is said once"
        assert not target.cause or target.phase is not TargetPhase.SENDING
        assert (release_at(target) < float("inf")) == (target.phase is TargetPhase.SETTLED)


@pytest.mark.parametrize("phase", [TargetPhase.SENDING, TargetPhase.CLOSING])
def test_blocks_that_may_still_be_read_are_not_released(phase: TargetPhase) -> None:
    target = made()
    if phase is TargetPhase.CLOSING:
        target.close()
    with pytest.raises(
        RuntimeError, match=rf"^the push of x is {phase.name.lower()} and cannot be released$"
    ):
        target.release()


def test_what_is_settled_again_stays_released_and_its_decoder_is_told_again() -> None:
    target = made()
    target.close(GIVEN_UP)
    target.settle()
    target.release()
    target.news = False
    target.settle()
    assert (target.phase, target.news) == (TargetPhase.RELEASED, True)
