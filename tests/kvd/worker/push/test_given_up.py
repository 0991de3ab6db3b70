"""Pushes that a decoding worker gives up: what it waits for, what it closes, and whom it tells."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import pytest

from kvd.backends.errors import BackendError
from kvd.client.errors import RefusedByDaemon, TimedOut
from kvd.geometry.rank import Rank
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.push import PushAnnounce, PushProgress, PushWithdraw
from kvd.wire.reply import Ok, Refused
from kvd.worker import unclosed
from kvd.worker.orders import StepOrders
from tests.kvd.worker.push.test_receiver import pending
from tests.support.rigs.bench import GENERATION, eventually
from tests.support.rigs.push import PushRig, Quiet, pushed

# --- giving up ---


def test_a_failure_at_one_source_waits_for_the_other(two: PushRig) -> None:
    two.start(pushed((2, 9)))
    two.announced()
    two.say(tp=1, failed="the request was aborted", quiesced=True)
    (told,) = two.withdrawn()
    assert (told.key.transfer_id, told.key.attempt, told.generation) == ("x", 0, GENERATION)
    assert pending(two), "the other source may still write"
    two.say(tp=0, quiesced=True)
    assert two.results().failed == {"d-1"}
    assert two.causes() == {"d-1": "prefiller p/tp1: the request was aborted"}
    assert two.backend.windows[0].open, "all are quiet, so nothing need be taken away"
    record = two.record()
    assert (record.state, record.mode) == ("miss", "push")


def test_a_deadline_is_a_miss_when_all_are_quiet(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.expire()
    rig.withdrawn()
    assert pending(rig)
    rig.say(quiesced=True)
    assert rig.results().bad_blocks == {2, 9}
    assert rig.causes()["d-1"].startswith("not complete within its 0.")


def test_what_is_withdrawn_and_yet_complete_is_quiet(rig: PushRig) -> None:
    """Nothing of it is left to write; it stays a miss, since that was decided."""
    rig.start(pushed((2, 9)))
    rig.expire()
    rig.withdrawn()
    rig.say("l0")
    rig.say("l1")
    assert rig.results().failed == {"d-1"}


def test_one_quiet_source_of_two_is_not_enough(two: PushRig, quiet_seconds: Quiet) -> None:
    quiet_seconds(0.2)
    two.start(pushed((2, 9)))
    two.expire()
    two.withdrawn()
    two.say(tp=0, quiesced=True)
    assert two.results().failed == {"d-1"}
    assert not two.backend.windows[0].open, "the other one's writes were stopped by closing the window"


def test_a_prefiller_that_never_answers_costs_the_window(rig: PushRig, quiet_seconds: Quiet) -> None:
    quiet_seconds(0.05)
    go_on, reached = rig.gates.stop("window.close")
    rig.start(pushed((2, 9)))
    (told,) = rig.announced()
    rig.expire()
    assert reached.wait(10)
    assert not rig.decoder.results().received, "reported while its bytes could still land"
    go_on.set()
    assert rig.results().failed == {"d-1"}
    rig.write("l0", told, (5, 6))
    assert rig.untouched(2, 9)


def test_without_the_closed_window_late_bytes_would_land(rig: PushRig, quiet_seconds: Quiet) -> None:
    """The check of the test above can fail: the same late write lands where the close does nothing."""
    quiet_seconds(0.05)
    rig.start(pushed((2, 9)))
    (told,) = rig.announced()
    rig.expire()
    assert rig.results().failed == {"d-1"}
    rig.backend.windows[0].open = True
    rig.write("l0", told, (5, 6))
    assert not rig.untouched(2, 9)


def test_the_others_on_a_closed_window_are_announced_anew(rig: PushRig, quiet_seconds: Quiet) -> None:
    quiet_seconds(0.05)
    rig.start(pushed((2,), tokens=4), pushed((9,), tokens=4, name="y", request_id="d-2"))
    first = next(a for a in rig.announced(2) if a.key.transfer_id == "y")
    rig.write("l0", first, (6,))
    rig.expire()
    assert rig.results().received == {"d-1"}
    again = rig.announced(3)[-1]
    assert (again.key.transfer_id, again.key.attempt, again.window) == ("y", 1, b"landing 1")
    rig.say("l1", name="y", attempt=0)
    rig.say(name="y", attempt=0, failed="its lane was destroyed")
    rig.write("l1", again, (6,))
    assert pending(rig), "what was written on the old window is written again, so it does not count"
    rig.write("l0", again, (6,))
    results = rig.results()
    assert (results.received, results.failed) == ({"d-2"}, set())
    assert rig.same((9,), (6,))
    assert rig.untouched(2)
    eventually(lambda: rig.record().attempts == 2)
    rig.start(pushed((3,), tokens=4, name="z", request_id="d-3"))
    for layer in ("l0", "l1"):
        rig.write(layer, rig.announced(4)[-1], (6,))
    assert rig.results().received == {"d-3"}
    eventually(lambda: rig.record().request_id == "d-3")
    assert rig.record().attempts == 1


def test_a_window_that_cannot_be_closed_holds_back_all_that_was_announced_on_it(
    rig: PushRig, quiet_seconds: Quiet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_seconds(0.05)
    monkeypatch.setattr(unclosed, "RETRY_SECONDS", 0.02)
    rig.gates.close_errors.append(BackendError("something holds the agent"))
    with caplog.at_level(logging.CRITICAL):
        rig.start(pushed((2,), tokens=4), pushed((9,), tokens=4, name="y", request_id="d-2"))
        rig.announced(2)
        rig.expire()
        assert rig.gates.close_tried.wait(10)
        rig.start(pushed((3,), tokens=4, name="z", request_id="d-3"))
        told = rig.announced(3)[-1]
        assert told.window == b"landing 1"
        rig.write("l0", told, (7,))
        rig.write("l1", told, (7,))
        assert rig.results().received == {"d-3"}
        rig.gates.close_errors.clear()
        results = rig.results(2)
    assert results.failed == {"d-1", "d-2"}
    assert rig.causes()["d-2"].endswith("could not be closed: something holds the agent")
    assert [w.key.transfer_id for w in rig.withdrawn(2)] == ["x", "y"]


def test_a_peer_that_goes_is_not_asked_to_be_quiet(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.gone()
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "peer p is gone: tp0 was killed"}
    assert not rig.backend.windows[0].open


def test_a_peer_that_restarts_takes_its_pushes_with_it(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.know("gen-2")
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "peer p restarted as generation gen-2"}
    assert not rig.backend.windows[0].open
    rig.start(pushed((3,), tokens=4, name="y", request_id="d-2", generation="gen-2"))
    told = rig.announced(2)[-1]
    assert (told.generations[0], told.window) == ("gen-2", b"landing 1")


def test_another_generations_end_changes_nothing(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.gone("gen-0")
    assert pending(rig)
    assert rig.backend.windows[0].open


def test_a_push_that_nobody_waits_for_is_given_up_at_once(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.decoder.start(StepOrders(dropped=["d-1", "never heard of"]))
    rig.withdrawn()
    rig.say(quiesced=True)
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "the request is over"}
    assert rig.record().code == "REQUEST_OVER"


def test_a_push_that_is_dropped_while_its_peer_is_asked_for_is_never_announced() -> None:
    rig = PushRig()
    rig.gone()
    rig.start(pushed((2, 9)))
    rig.decoder.start(StepOrders(dropped=["d-1"]))
    rig.script.asked(GetPeer)[0].answer(PeerReady(local_engine="d", peer=rig.p.card()))
    assert rig.results().failed == {"d-1"}
    assert rig.script.told(PushAnnounce) == []
    assert rig.withdrawn(), "its prefiller keeps blocks until somebody says that none are wanted"
    rig.close()


def test_a_push_that_is_dropped_before_it_could_be_announced_is_declined(rig: PushRig) -> None:
    rig.script.state = replace(rig.script.state, engine_generation="")
    rig.start(pushed((2, 9)))
    eventually(lambda: rig.decoder._peers.receive_threads["p"]._arrivals)
    rig.decoder.start(StepOrders(dropped=["d-1"]))
    assert rig.results().failed == {"d-1"}
    assert rig.script.told(PushAnnounce) == []
    (told,) = rig.withdrawn()
    assert (told.key.transfer_id, told.key.attempt) == ("x", 0)


def test_a_second_request_under_the_same_id_does_not_decline_the_first(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.start(pushed((3,), tokens=4, request_id="d-2"))
    assert rig.results().failed == {"d-2"}
    assert rig.script.told(PushWithdraw) == []


def test_a_source_that_cannot_say_what_may_still_land_costs_the_window_at_once(rig: PushRig) -> None:
    """Nobody falls quiet here in the time of a test: only the closed window lets the miss be reported."""
    rig.start(pushed((2, 9)), pushed((3,), tokens=4, request_id="d-2", name="y"))
    rig.announced(2)
    rig.say(name="x", failed="the transfer failed")
    assert rig.results().failed == {"d-1"}
    assert not rig.backend.windows[0].open
    again = rig.announced(3)[-1]
    assert (again.key.transfer_id, again.key.attempt) == ("y", 1)


def test_several_failures_at_once_cost_one_window(rig: PushRig) -> None:
    rig.start(pushed((2, 9)), pushed((3,), tokens=4, request_id="d-2", name="y"))
    rig.announced(2)
    go_on, reached = rig.gates.stop("progress")
    assert reached.wait(30)
    for name in ("x", "y"):
        rig.say(name=name, failed="the transfer failed")
    go_on.set()
    assert rig.results(2).failed == {"d-1", "d-2"}
    assert len(rig.backend.windows) == 1


def test_what_is_not_wanted_is_declined(rig: PushRig) -> None:
    rig.decoder.start(StepOrders(declined=[("x", pushed((1,)).prefill)]))
    (told,) = rig.withdrawn()
    assert (told.key.transfer_id, told.key.prefiller, told.key.rank) == ("x", "p", Rank(tp=0))


def test_a_final_refusal_is_the_cause(rig: PushRig, quiet_seconds: Quiet) -> None:
    quiet_seconds(0.05)
    rig.start(pushed((2, 9)))
    rig.answer(
        answer=RefusedByDaemon(Refused(code="KVD-PEER-GENERATION", message="it restarted", final=True))
    )
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "prefiller p did not take the announcement: it restarted"}
    assert rig.withdrawn(), "one of its workers may have had it all the same"


def test_an_announcement_that_does_not_get_through_is_a_miss(rig: PushRig, quiet_seconds: Quiet) -> None:
    """What kvd refuses for now, or does not take, the session repeats; in the end it says that it gave up."""
    quiet_seconds(0.05)
    rig.start(pushed((2, 9)))
    rig.answer(answer=TimedOut("kvd did not answer within 5 s"))
    assert rig.results().failed == {"d-1"}
    assert rig.causes()["d-1"].endswith("did not take the announcement: kvd did not answer within 5 s")


def test_a_withdrawal_takes_the_place_of_the_announcement(rig: PushRig) -> None:
    """Under one key, so that no announcement is repeated behind it."""
    rig.start(pushed((2, 9)))
    rig.expire()
    rig.withdrawn()
    keys = {type(asked.message): asked.key for asked in rig.script.delivered if hasattr(asked.message, "key")}
    assert keys[PushAnnounce] == keys[PushWithdraw]


def test_a_source_that_falls_quiet_by_itself_has_given_up(two: PushRig) -> None:
    two.start(pushed((2, 9)))
    two.announced()
    two.say(tp=0, quiesced=True)
    two.withdrawn()
    two.say(tp=1, quiesced=True)
    assert two.results().failed == {"d-1"}
    assert two.causes() == {"d-1": "prefiller p/tp0 writes no more of it"}
    assert two.record().code == "PREFILL_ENDED"


def test_progress_of_unknown_transfers_is_no_error(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    (told,) = rig.announced()
    stray = PushProgress(key=told.key, source=Rank(tp=0), failed="late")
    for changes in ({"transfer_id": "other"}, {"attempt": 7}, {"rank": Rank(tp=3)}, {"prefiller": "q"}):
        key = msgspec.structs.replace(told.key, **changes)
        assert isinstance(rig.script.push(msgspec.structs.replace(stray, key=key)), Ok)
    assert pending(rig)
