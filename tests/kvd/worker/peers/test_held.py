"""What a worker says it holds of its peers, and the order to give it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.backends.errors import BackendError
from kvd.wire.agent import DropPeer, GetHeld, HeldPeer, HeldPeers
from kvd.worker import unclosed
from tests.support.rigs.bench import eventually, order, prefill, ready
from tests.support.rigs.pull import Rig


def told(rig: Rig, message: GetHeld | DropPeer | None = None) -> tuple[HeldPeer, ...]:
    answer = rig.decoder._on_message(message or GetHeld())
    assert isinstance(answer, HeldPeers)
    return answer.peers


def first(rig: Rig, wanted: Callable[[HeldPeer], Any]) -> HeldPeer:
    """The first that is held and is so, as soon as there is one."""
    found = eventually(lambda: next((one for one in told(rig) if wanted(one)), None))
    assert found is not None
    return found


def loaded(rig: Rig) -> HeldPeer:
    """What is held once a load has come."""
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == set()
    return first(rig, lambda one: not one.loads)


def test_a_lane_is_held_until_the_order_comes_and_made_again_by_the_next_load(rig: Rig) -> None:
    held = loaded(rig)
    assert (held.engine_id, held.use, held.lanes, held.stuck) == ("p", "reads", 1, 0)
    assert told(rig, DropPeer(engine_id="another")) == (held,)
    assert told(rig, DropPeer(engine_id="p", generation="another")) == (held,)
    assert told(rig, DropPeer(engine_id="p", generation=held.generation)) == (held,)
    eventually(lambda: told(rig) == ())
    assert (rig.gates.opened, rig.gates.closed) == (1, 1)
    loaded(rig)
    assert rig.gates.opened == 2


def test_a_lane_that_a_load_uses_stays_and_by_force_its_load_is_a_miss_after_the_lane_is_gone(
    rig: Rig,
) -> None:
    rig.faults.hold = {0}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    held = first(rig, lambda one: one.loading_bytes)
    assert held.loads == 1
    told(rig, DropPeer(engine_id="p"))
    go_on, reached = rig.gates.stop("close")
    told(rig, DropPeer(engine_id="p", force=True, cause="somebody wants it"))
    assert reached.wait(10), "the first order left it alone"
    assert not rig.decoder.results().received, "reported while its bytes could still land"
    (closing,) = told(rig)
    assert closing.busy == "closing the lane to p"
    go_on.set()
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "somebody wants it"}
    eventually(lambda: told(rig) == ())


def test_a_lane_that_cannot_be_closed_is_stuck_until_it_can(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unclosed, "RETRY_SECONDS", 3600.0)
    held = loaded(rig)
    rig.gates.close_errors.append(BackendError("the device is busy"))
    told(rig, DropPeer(engine_id="p"))
    stuck = first(rig, lambda one: one.stuck)
    assert (stuck.lanes, stuck.stuck, stuck.generation) == (1, 1, held.generation)
    rig.gates.close_errors.clear()
    told(rig, DropPeer(engine_id="p"))  # tries again at once
    eventually(lambda: told(rig) == ())


def test_a_lane_that_is_still_being_connected_is_told_with_what_its_thread_does(rig: Rig) -> None:
    loaded(rig)
    told(rig, DropPeer(engine_id="p"))
    eventually(lambda: told(rig) == ())
    go_on, reached = rig.gates.stop("add")
    rig.start(order(prefill(((5, 6),)), (2, 9), request_id="d-2"))
    assert reached.wait(10)
    (held,) = told(rig)
    assert (held.lanes, held.busy, held.loads) == (1, "connecting", 1)
    go_on.set()
    assert rig.results().failed == set()


def test_another_generation_closes_the_lane_by_itself(rig: Rig) -> None:
    before = loaded(rig)
    card: Any = rig.p_script.card().card
    rig.decoder._on_message(ready(card, generation="gen-2"))
    now = first(rig, lambda one: one.generation != before.generation)
    assert [one.generation for one in told(rig)] == [now.generation]
