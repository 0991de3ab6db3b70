"""What both sides of a push hold of each other, and the order to give it up."""

from __future__ import annotations

from kvd.wire.agent import DropPeer, GetHeld, HeldPeer, HeldPeers
from kvd.worker.worker import WorkerHalf
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, announce, dense
from tests.support.rigs.push import PushRig, pushed
from tests.support.rigs.send import sending, step


def told(half: WorkerHalf, message: GetHeld | DropPeer | None = None) -> tuple[HeldPeer, ...]:
    answer = half._on_message(message or GetHeld())
    assert isinstance(answer, HeldPeers)
    return answer.peers


def test_the_window_that_a_prefiller_writes_into_goes_by_force_while_something_is_to_arrive(
    rig: PushRig,
) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    (held,) = [one for one in told(rig.decoder) if one.use == "window"]  # the probe has a lane to read by
    assert (held.engine_id, held.use, held.lanes, held.loads, held.bytes) == ("p", "window", 1, 1, 0)
    told(rig.decoder, DropPeer(engine_id="p"))
    eventually(lambda: rig.decoder._peers.receive_threads["p"]._thread.idle)
    assert rig.backend.windows[0].open
    told(rig.decoder, DropPeer(engine_id="p", force=True, cause="somebody wants it"))
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "somebody wants it"}
    assert not rig.backend.windows[0].open
    assert [one for one in told(rig.decoder) if one.use == "window"] == []


def test_the_lane_that_a_prefiller_writes_by_goes_when_nothing_is_owed() -> None:
    with sending(dense("p"), dense("d")) as rig:
        rig.fill(REQUEST.remote)
        announce(rig)
        half = rig.workers[0].half
        rig.run(step(REQUEST.remote, 40, 40), ["a", "b"])
        eventually(lambda: rig.there() == {("a", 40), ("b", 40)})
        held = eventually(lambda: [one for one in told(half) if not one.loads])
        assert [(one.engine_id, one.use, one.lanes) for one in held] == [("d", "writes", 1)]
        told(half, DropPeer(engine_id="d"))
        eventually(lambda: told(half) == ())
