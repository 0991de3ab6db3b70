"""A backend call that hangs, or a lane that cannot be destroyed: what waits behind it, and what may be reported."""

from __future__ import annotations

import logging
import time

import pytest

from kvd.backends.errors import BackendError
from kvd.worker import unclosed
from kvd.worker.pull import reader as lanes
from tests.support.rigs.bench import eventually, order, prefill
from tests.support.rigs.pull import Rig


def test_what_waits_behind_a_stuck_call_is_ended_in_time(rig: Rig) -> None:
    """Nothing of it was posted, so nothing of it can land: it need not wait for the call."""
    go_on, reached = rig.gates.stop("submit")
    rig.start(order(prefill(((5,),), tokens=4), (2,), request_id="stuck"))
    assert reached.wait(10)
    rig.start(order(prefill(((6,),), tokens=4), (9,), request_id="behind", seconds=0.05))
    results = rig.results()
    assert results.received == {"behind"}
    assert rig.causes()["behind"].endswith("the thread of peer p is busy posting")
    go_on.set()
    assert rig.results().received == {"stuck"}
    assert rig.same((2,), (5,))
    assert rig.untouched(9), "what was ended is not posted afterwards"


def test_what_starts_over_behind_a_stuck_call_is_ended_in_time_and_not_posted_afterwards(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(order(prefill(((5,),), tokens=4), (2,), request_id="first"))
    eventually(lambda: rig.decoder._peers.pull_threads["p"]._active)
    go_on, reached = rig.gates.stop("close")
    rig.faults.fail_after = {1: 0}
    rig.start(order(prefill(((6,),), tokens=4), (9,), request_id="second", seconds=1.0))
    assert reached.wait(10), "the second failed, so the lane goes and both start over"
    stuck, reached = rig.gates.stop("submit")
    go_on.set()
    assert reached.wait(10)
    assert rig.results().received == {"second"}
    stuck.set()
    assert rig.results().received == {"first"}
    assert rig.same((2,), (5,))
    assert rig.untouched(9)


def test_a_stuck_load_is_never_reported_before_its_call_returns(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "STUCK_AFTER", 0.05)
    go_on, reached = rig.gates.stop("submit")
    with caplog.at_level(logging.ERROR):
        rig.start(order(prefill(((5,),), tokens=4), (2,), request_id="stuck", seconds=0.5))
        assert reached.wait(10)
        eventually(lambda: "load of stuck from p" in caplog.text)
    assert "while its thread is busy posting" in caplog.text
    assert not rig.decoder.results().received
    rig.decoder.loads.begun["stuck"].complain_at = time.monotonic() + 3600.0
    rig.decoder._peers._watch.by(0.0)  # from here on nobody looks for an hour, but for new loads
    began = time.monotonic()
    rig.start(order(prefill(((6,),), tokens=4), (9,), request_id="later"))
    assert rig.results().received == {"later"}, "a way that is stuck refuses new loads at once"
    assert time.monotonic() - began < 5.0, "not only when it is complained of again"
    rig.faults.hold = {0}
    go_on.set()
    assert rig.results().failed == {"stuck"}


def test_a_lane_that_cannot_be_destroyed_holds_back_all_that_was_posted_on_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unclosed, "RETRY_SECONDS", 0.02)
    rig.faults.hold = {0, 1}
    rig.gates.close_errors.append(BackendError("something holds the agent"))
    with caplog.at_level(logging.CRITICAL):
        rig.start(
            order(prefill(((5,),), tokens=4), (2,), request_id="given-up"),
            order(prefill(((6,),), tokens=4), (9,), request_id="beside"),
        )
        eventually(lambda: rig.decoder.loads.begun["beside"].times.posted)
        rig.expire("given-up")
        assert rig.gates.close_tried.wait(10)
        rig.start(order(prefill(((7,),), tokens=4), (3,), request_id="on a new lane"))
        assert rig.results().received == {"on a new lane"}
        rig.faults.release(1)
        rig.gates.close_errors.clear()
        results = rig.results(2)
    assert results.failed == {"given-up", "beside"}
    assert rig.causes()["beside"].endswith("could not be closed: something holds the agent")
    assert rig.untouched(2, 9)
