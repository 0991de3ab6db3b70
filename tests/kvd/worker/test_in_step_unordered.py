"""Loads behind which no step runs after all: misses, also where all of their bytes come; and one that stood."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvd.backends.errors import BackendError
from kvd.wire.handshake import PeerGone
from kvd.worker import in_step
from kvd.worker.cause import Cause, code_of
from kvd.worker.in_step import NOT_POSTED, UNORDERED
from kvd.worker.load import Load
from kvd.worker.orders import ClaimAnswer
from kvd.worker.peer_threads import PeerThreads
from tests.kvd.worker.test_in_step import LONG, STREAM, load_of, settled, stands, used
from tests.support.rigs.bench import GENERATION, eventually, ready
from tests.support.rigs.pull import Rig, SlowBackend, SlowLane


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(stream_of=lambda: STREAM)
    made.script.push(ready(made.card))
    made.asleep()
    yield made
    made.close()


def test_one_that_is_posted_on_a_new_lane_which_orders_no_streams_is_a_miss(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is queued when its bytes come, and reads its blocks whenever it likes."""
    monkeypatch.setattr(in_step, "JOIN_SECONDS", LONG)
    lane = SlowBackend.lane

    def of_an_engine(backend: SlowBackend, name: str) -> SlowLane:
        monkeypatch.delattr(SlowLane, "precede")
        return lane(backend, name)

    monkeypatch.setattr(SlowBackend, "lane", of_an_engine)
    rig.faults.refuse, rig.faults.hold = {0}, {1}
    rig.start(used())
    assert rig.gates.opened == 2
    rig.faults.release(1)
    assert not stands(rig)
    assert settled(rig, "d-1") == {"d-1": UNORDERED}


def test_one_whose_claim_is_refused_between_two_steps_does_not_stand(rig: Rig) -> None:
    refused = Cause("another request has its blocks", "LEASE_ENDED")
    rig.start(replace(used(), unanswered=True))
    rig.decoder.loads.answered([ClaimAnswer("of another", 20.0), ClaimAnswer("d-1", 0.0, refused)])
    assert not stands(rig)
    assert settled(rig, "d-1") == {"d-1": refused}


def test_it_is_known_since_the_answer_came_and_not_since_somebody_looked(rig: Rig) -> None:
    rig.start(replace(used(), unanswered=True))
    load = load_of(rig)
    before = time.monotonic()
    rig.decoder.loads.answered([ClaimAnswer("d-1", 20.0, ago=5.0)])
    assert stands(rig)
    assert load.claim.answered == pytest.approx(before - 5.0, abs=1.0)


def test_a_load_of_the_same_name_is_left_alone_when_an_earlier_one_ends(rig: Rig) -> None:
    rig.start(used())
    first = load_of(rig)
    rig.decoder.loads.begun["d-1"] = another = replace(first)
    assert stands(rig)
    assert settled(rig, "d-1") == {"d-1": None}
    assert load_of(rig) is another


def test_one_that_the_device_would_not_wait_for_is_a_miss_though_it_was_complete_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        rig.decoder.in_step.let_go("d-1")  # as any other load of that peer makes its thread look
        eventually(lambda: load_of(rig).times.ended)
        raise BackendError("the device would not wait")

    monkeypatch.setattr(SlowLane, "precede", refusing)
    rig.start(used())
    assert rig.same((2, 9), (5, 6))
    assert not stands(rig)
    assert settled(rig, "d-1") == {"d-1": Cause("the device would not wait", "TRANSFER_FAILED")}


def test_a_step_waits_so_long_and_no_longer_for_a_thread_that_hangs_while_it_posts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_step, "JOIN_SECONDS", 0.01)
    monkeypatch.setattr(in_step, "STUCK_SECONDS", 0.01)
    begin_now = PeerThreads.begin_now
    go_on, reached = rig.gates.stop("submit")

    def too_late(threads: PeerThreads, load: Load) -> bool:
        """Another thread was at work when the step would have posted it itself, and posts it now."""
        threading.Thread(target=begin_now, args=(threads, load), daemon=True).start()
        return reached.wait(LONG)

    monkeypatch.setattr(PeerThreads, "begin_now", too_late)
    rig.start(used())
    assert not stands(rig)
    assert rig.decoder.in_step.ended(0.0).loads == {}, "it may land yet"
    go_on.set()
    assert load_of(rig).under_way.wait(LONG)
    assert settled(rig, "d-1") == {"d-1": NOT_POSTED}
    assert rig.gates.streams == []


def test_no_step_asks_for_a_peer_that_has_just_gone(rig: Rig) -> None:
    rig.script.push(PeerGone(engine_id="p", generation=GENERATION, reason="it left"))
    rig.start(used())
    assert rig.script.calls == []
    assert code_of(settled(rig, "d-1")["d-1"]) == "PEER_GONE"


def test_no_step_reads_from_another_generation_of_its_peer(rig: Rig) -> None:
    rig.script.push(ready(rig.card, "gen-2"))
    rig.start(used())
    assert rig.script.calls == []
    assert code_of(settled(rig, "d-1")["d-1"]) == "PEER_GONE"
    assert rig.untouched(2, 9)


def test_one_that_stood_is_done_though_it_is_looked_at_after_its_time(rig: Rig) -> None:
    rig.start(used())
    assert stands(rig)
    rig.expire("d-1")
    assert stands(rig), "its bytes were here in time"
    rig.decoder.in_step.let_go("d-1")
    (record,) = eventually(rig.records)
    assert record.state == "done"
