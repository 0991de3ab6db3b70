"""What a decoding worker makes of a push: a scripted prefiller, windows that can be taken away."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from kvd.client.errors import TimedOut
from kvd.geometry.rank import Rank
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint
from kvd.wire.push import LayersThere, PushAnnounce, PushWithdraw
from kvd.wire.transfer import ReportTransfers
from kvd.worker import unclosed
from kvd.worker.push import receiver as arriving
from tests.support.rigs.bench import GENERATION, eventually
from tests.support.rigs.push import BLOCKS, PushRig, Quiet, pushed


def pending(rig: PushRig) -> bool:
    """Whether nothing has ended although every word said so far was heard."""
    thread = rig.decoder._peers.receive_threads["p"]
    eventually(lambda: thread._thread.idle)
    number = rig.backend.windows[-1].served if rig.lands and rig.backend.windows else 0
    if rig.lands and rig.backend.windows and rig.backend.windows[-1].open and thread._arrivals:
        eventually(lambda: not rig.backend.windows[-1].open or rig.backend.windows[-1].served > number + 1)
    return not rig.decoder.results().received


# --- the way it goes well ---


def test_an_announcement_says_what_the_prefiller_needs(rig: PushRig) -> None:
    rig.start(pushed((2, 9), computed=4, tokens=12))
    (told,) = rig.announced()
    key = told.key
    assert (key.transfer_id, key.prefiller, key.decoder, key.rank) == ("x", "p", "d", Rank(tp=0))
    assert (key.attempt, key.prefiller_endpoint) == (0, Endpoint("h", 7))
    assert told.generations == (GENERATION, "d-gen")
    assert (told.tokens, told.computed) == (12, 4)
    assert [(run.group, run.first, run.ids) for run in told.blocks] == [(0, 1, (2, 9))]
    assert told.window == b"landing 0"
    assert 20 < told.seconds <= 30


def test_a_load_is_done_when_every_layer_is_there(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    (told,) = rig.announced()
    rig.answer()
    rig.write("l0", told, (5, 6))
    assert pending(rig)
    rig.write("l1", told, (5, 6))
    results = rig.results()
    assert (results.received, results.failed, results.bad_blocks) == ({"d-1"}, set(), set())
    assert rig.same((2, 9), (5, 6))
    assert rig.untouched(*(b for b in range(BLOCKS) if b not in (2, 9)))
    assert rig.causes() == {"d-1": ""}
    assert rig.backend.windows[0].open, "and the window serves the next one"
    assert rig.script.told(PushWithdraw) == []


def test_progress_comes_in_any_order_and_twice(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    for layer in ("l1", "l1", "l0", "l0"):
        rig.say(layer)
    assert rig.results().failed == set()
    rig.say("l0")
    assert pending(rig), "an echo of what has ended is nothing"


def test_both_layers_in_one_message_are_two(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.say(there=(LayersThere(group=0, layers=("l0", "l1", "somebody elses"), tokens=8),))
    assert rig.results().failed == set()


def test_progress_before_the_announcement_is_acknowledged_counts(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.say("l0")
    rig.say("l1")
    assert rig.results().failed == set()
    rig.answer(answer=TimedOut("no answer"))
    rig.start(pushed((3,), name="y", request_id="d-2", tokens=4))
    rig.announced(2)
    rig.say("l0", "l1", name="y")
    assert rig.results().received == {"d-2"}


def test_progress_outweighs_a_lost_acknowledgement(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.say("l0")
    rig.answer(answer=TimedOut("no answer"))
    assert pending(rig)
    rig.say("l1")
    assert rig.results().failed == set()


def test_every_source_must_have_said_so(two: PushRig) -> None:
    two.start(pushed((2, 9)))
    (told,) = two.announced()
    for layer, tp in (("l0", 0), ("l1", 0), ("l0", 1)):
        two.write(layer, told, (5, 6), tp=tp)
    assert pending(two)
    two.write("l1", told, (5, 6), tp=1)
    assert two.results().failed == set()
    assert two.same((2, 9), (5, 6))


def test_a_worker_of_a_larger_engine_waits_for_what_is_its_own() -> None:
    rig = PushRig(decode_tp=2)
    rig.start(pushed((2, 9)))
    (told,) = rig.announced()
    rig.write("l0", told, (5, 6))
    rig.write("l1", told, (5, 6))
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))
    assert not rig.d.buffers[1].any()
    rig.close()


def test_a_prompt_of_which_nothing_is_missing_needs_no_announcement(rig: PushRig) -> None:
    rig.start(pushed((), tokens=8, computed=8))
    assert rig.results().failed == set()
    assert rig.script.told(PushAnnounce) == []
    assert rig.withdrawn(), "else its prefiller would keep the blocks for this worker too"


def test_a_peer_that_is_not_known_is_asked_for_first() -> None:
    rig = PushRig()
    rig.gone()
    rig.start(pushed((2, 9)))
    (asked,) = rig.script.asked(GetPeer)
    assert rig.script.told(PushAnnounce) == []
    asked.answer(PeerReady(local_engine="d", peer=rig.p.card()))
    rig.announced()
    rig.say("l0")
    rig.say("l1")
    assert rig.results().failed == set()
    rig.close()


def test_the_record_has_the_stages_of_a_push(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    (told,) = rig.announced()
    rig.answer()
    rig.write("l0", told, (5, 6))
    rig.write("l1", told, (5, 6))
    rig.results()
    record = rig.record()
    assert (record.mode, record.state, record.cause) == ("push", "done", "")
    assert (record.remote_request_id, record.remote_engine, record.remote_ranks) == ("x", "p", ("tp0",))
    assert list(record.stages) == ["queued", "handshake", "announce", "wait", "wire", "other"]
    assert all(seconds >= 0 for seconds in record.stages.values())
    assert record.bytes == 2 * 2 * (2 * 4 * 8 * 2)
    assert [(g.blocks, g.bytes) for g in record.groups] == [(2, record.bytes)]


def test_our_own_generation_is_awaited(rig: PushRig) -> None:
    rig.script.state = replace(rig.script.state, engine_generation="")
    rig.start(pushed((2, 9)))
    assert pending(rig)
    assert rig.script.told(PushAnnounce) == []
    rig.script.state = replace(rig.script.state, engine_generation="d-2")
    assert rig.announced()[0].generations == (GENERATION, "d-2")


def test_a_transfer_id_is_for_one_prefill_only(rig: PushRig) -> None:
    """Late words about the first would pass for words about the second."""
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.start(pushed((3,), tokens=4, request_id="d-2"))
    assert rig.results().failed == {"d-2"}
    assert "transfer x was announced before" in rig.causes()["d-2"]
    rig.say("l0")
    rig.say("l1")
    assert rig.results().received == {"d-1"}
    rig.start(pushed((3,), tokens=4, request_id="d-3"))
    assert rig.results().failed == {"d-3"}


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        (
            pushed((2, 9), generation="gen-0"),
            "is generation gen-1 now, the push was asked of generation gen-0",
        ),
        (pushed((2, 9), seconds=-1.0), "ran out before the load began"),
    ],
)
def test_what_cannot_begin_is_a_miss_at_once(rig: PushRig, order: object, cause: str) -> None:
    rig.start(order)  # type: ignore[arg-type]
    for asked in rig.script.asked(GetPeer):
        asked.answer(PeerReady(local_engine="d", peer=rig.p.card()))
    assert rig.results().failed == {"d-1"}
    assert cause in rig.causes()["d-1"]
    assert rig.script.told(PushAnnounce) == []


def test_a_window_that_cannot_be_made_is_a_miss(rig: PushRig) -> None:
    rig.backend.refused = "no transport that could be stopped"
    rig.start(pushed((2, 9)))
    assert rig.results().failed == {"d-1"}
    assert "cannot write here: no transport" in rig.causes()["d-1"]


# --- the thread ---


def test_the_window_is_served_while_something_is_expected(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    eventually(lambda: rig.backend.windows[0].served > 3)


def test_what_waits_behind_a_stuck_call_is_ended_in_time(rig: PushRig) -> None:
    go_on, reached = rig.gates.stop("window")
    rig.start(pushed((2, 9), seconds=0.5))
    assert reached.wait(10)
    rig.start(pushed((3,), tokens=4, name="y", request_id="d-2", seconds=0.05))
    assert rig.results(2).failed == {"d-1", "d-2"}
    assert "the thread of what peer p pushes is busy" in rig.causes()["d-1"]
    reports = eventually(lambda: (told := rig.script.told(ReportTransfers))[1:] and told)
    records = [record for report in reports for record in report.records]
    assert [(r.state, r.groups, r.descriptors) for r in records] == [("miss", (), 0)] * 2
    go_on.set()
    rig.start(pushed((4,), tokens=4, name="z", request_id="d-3"))
    assert [a.key.transfer_id for a in rig.announced()] == ["z"], "what was ended is not announced afterwards"


def test_what_was_announced_is_never_reported_before_a_stuck_call_returns(
    rig: PushRig, quiet_seconds: Quiet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_seconds(0.01)
    monkeypatch.setattr(arriving, "STUCK_AFTER", 0.05)
    with caplog.at_level(logging.ERROR):
        rig.start(pushed((2, 9)))
        rig.announced()
        go_on, reached = rig.gates.stop("progress")
        assert reached.wait(10)
        rig.expire()
        rig.decoder._peers._watch.by(0.0)
        eventually(lambda: "load of d-1 from p" in caplog.text)
    assert "while its thread is busy serving its window" in caplog.text
    assert not rig.decoder.results().received
    go_on.set()
    assert rig.results().failed == {"d-1"}


def test_an_unexpected_error_ends_what_is_on_the_way_and_not_the_thread(
    rig: PushRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    with caplog.at_level(logging.CRITICAL):
        monkeypatch.setattr(rig.backend.windows[0], "progress", lambda: 1 / 0)
        assert rig.results().failed == {"d-1"}
    assert not rig.backend.windows[0].open
    assert "ZeroDivisionError" in rig.causes()["d-1"]
    rig.start(pushed((3,), tokens=4, name="y", request_id="d-2"))
    rig.announced(2)
    rig.say("l0", name="y")
    rig.say("l1", name="y")
    assert rig.results().failed == set()


def test_closing_gives_up_what_is_on_the_way(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.decoder.close()
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "the engine is shutting down"}
    assert not rig.backend.windows[0].open
    assert rig.backend.closed
    rig.start(pushed((3,), tokens=4, name="y", request_id="d-2"))
    assert rig.results().failed == {"d-2"}


def test_memory_stays_registered_while_a_window_stands(
    rig: PushRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvd.worker.worker.CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(unclosed, "RETRY_SECONDS", 0.02)
    go_on, reached = rig.gates.stop("window.close")
    rig.start(pushed((2, 9)))
    rig.announced()
    with caplog.at_level(logging.ERROR):
        rig.decoder.close()
    assert reached.is_set()
    assert "shutting down with lanes at work (p)" in caplog.text
    assert not rig.backend.closed
    go_on.set()
    assert rig.results().failed == {"d-1"}
