"""The worker's half and its lanes: what arrives, what is reported when, and what must never land."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import pytest

from kvd.backends.contract import Transfer
from kvd.backends.memory import MemoryLane
from kvd.client.errors import RefusedByDaemon
from kvd.wire.handshake import GetPeer, PeerGone
from kvd.wire.identity import Endpoint
from kvd.wire.registration import RegisterWorker
from kvd.wire.reply import Ok, Refused
from kvd.worker.host.locality import ranges
from kvd.worker.orders import StepOrders
from kvd.worker.settings import ConnectorSettings
from tests.support.no_threads import refuse_threads
from tests.support.rigs.bench import cache_config, eventually, full, order, prefill, ready
from tests.support.rigs.pull import BLOCKS, Rig

BLOCK_BYTES = 2 * 4 * 8 * 2


def test_a_load_copies_its_blocks_and_no_others(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    results = rig.results()
    assert (results.received, results.failed, results.bad_blocks) == ({"d-1"}, set(), set())
    assert rig.same((2, 9), (5, 6))
    assert rig.untouched(*(b for b in range(BLOCKS) if b not in (2, 9)))
    assert rig.causes() == {"d-1": ""}


@pytest.mark.parametrize(("home", "named"), [("auto", None), ("head:7766", Endpoint("head", 7766))])
def test_a_worker_names_the_home_of_an_engine_on_several_hosts(home: str, named: Endpoint | None) -> None:
    made = Rig(settings=ConnectorSettings(backend="memory", home=home))
    assert made.script.card().home == named
    made.close()


def test_a_worker_tells_where_it_stands_in_its_host() -> None:
    made = Rig()
    stands = made.script.card().locality
    assert stands is not None
    assert stands.cpus == ranges(os.sched_getaffinity(0))
    assert stands.gpu is None
    made.close()


def test_the_record_counts_every_byte_once(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.state, record.bytes, record.tokens) == ("done", 2 * 2 * BLOCK_BYTES, 8)
    assert (record.remote_engine, record.remote_ranks, record.backend) == ("p", ("tp0",), "memory")
    assert [(g.blocks, g.bytes) for g in record.groups] == [(2, 4 * BLOCK_BYTES)]
    assert list(record.stages) == ["queued", "handshake", "plan", "post", "wire", "other"]


def test_the_record_names_what_moved_the_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend may stand for several backends, and say of each transfer which of them it was."""
    submit = MemoryLane.submit

    def named(*arguments: Any) -> Transfer:
        transfer = submit(*arguments)
        transfer.backend = "direct"
        return transfer

    monkeypatch.setattr(MemoryLane, "submit", named)
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.state, record.backend) == ("done", "direct")


def test_a_peer_is_asked_for_when_it_is_not_known() -> None:
    rig = Rig()
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    (asked,) = rig.script.asked(GetPeer)
    assert (asked.message.local_engine, asked.message.engine_id, asked.message.generation) == (
        "d",
        "p",
        "gen-1",
    )
    assert not rig.decoder.results().received
    asked.answer(ready(rig.card))
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))
    rig.close()


def test_a_step_with_nothing_else_to_do_gives_a_load_its_time() -> None:
    rig = Rig()
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    (asked,) = rig.script.asked(GetPeer)
    began = time.monotonic()
    assert not rig.decoder.results(0.05).received
    assert time.monotonic() - began >= 0.05
    asked.answer(ready(rig.card))
    assert rig.decoder.results(60.0).received == {"d-1"}
    began = time.monotonic()
    assert not rig.decoder.results(600.0).received  # nothing is under way, so nothing is waited for
    rig.decoder.start(StepOrders(freed=["p-1"]))
    assert rig.decoder.results(600.0).sent == {"p-1"}
    assert time.monotonic() - began < 300
    rig.close()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (RefusedByDaemon(Refused(code="KVD-X", message="no such engine")), "peer p: no such engine"),
        (Ok(), "peer p: kvd answered Ok"),
        (RuntimeError("boom"), "peer p: RuntimeError: boom"),
    ],
)
def test_a_peer_that_does_not_become_known_is_a_miss(answer: Ok | Exception, cause: str) -> None:
    rig = Rig()
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    (asked,) = rig.script.asked(GetPeer)
    if isinstance(answer, Ok):
        asked.answer(answer)
    else:
        asked.future.set_exception(answer)
    assert rig.results().bad_blocks == {2, 9}
    assert rig.causes() == {"d-1": cause}
    rig.close()


def test_each_generation_of_a_peer_is_described_in_one_line(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvd.worker.pull.reader"):
        for generation in ("gen-2", "gen-2", "gen-3"):
            rig.script.push(ready(rig.card, generation))
        eventually(lambda: "generation gen-3" in caplog.text)
    said = [m for m in caplog.messages if "reads from" in m]
    assert said[-1] == (
        "tp0 of d (tp1) reads from tp0 of p (tp1, generation gen-3);"
        " group 0 full: blocks of 4 from 4, 128 bytes a layer, heads 0..1"
    )
    assert len(said) == len(set(said))


def test_an_engine_does_not_read_from_itself(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),), engine_id="d"), (2, 9)))
    rig.script.asked(GetPeer)[-1].answer(ready(rig.script.card().card))
    assert rig.results().failed == {"d-1"}
    assert "engine d is this engine itself" in rig.causes()["d-1"]
    assert "d" not in rig.decoder._peers.pull_threads


def test_a_refused_submit_is_tried_again_on_a_new_lane(rig: Rig) -> None:
    rig.faults.refuse = {0}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))
    assert rig.gates.opened == 2


def test_a_transfer_that_fails_half_way_is_tried_again(rig: Rig) -> None:
    rig.faults.fail_after = {0: 1}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))


def test_three_failures_are_a_miss_that_names_the_last(rig: Rig) -> None:
    rig.faults.refuse = {0, 1, 2}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    results = rig.results()
    assert (results.failed, results.bad_blocks) == ({"d-1"}, {2, 9})
    assert rig.causes() == {"d-1": "submit 2 is to be refused"}
    assert rig.untouched(2, 9)
    (record,) = eventually(rig.records)
    assert (record.state, record.cause) == ("miss", "submit 2 is to be refused")


def test_a_load_past_its_deadline_is_reported_only_after_its_lane_is_gone(rig: Rig) -> None:
    rig.faults.hold = {0}
    go_on, reached = rig.gates.stop("close")
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.expire()
    assert reached.wait(10)
    assert not rig.decoder.results().received, "reported while its bytes could still land"
    go_on.set()
    assert rig.results().failed == {"d-1"}
    assert rig.causes()["d-1"].startswith("not complete within its 0.")


def test_late_bytes_do_not_land_after_the_report(rig: Rig) -> None:
    rig.faults.late = {0, 1, 2}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == {"d-1"}
    for number in range(3):
        rig.faults.release(number)
    assert rig.untouched(2, 9)


def test_a_load_that_shares_the_lane_of_a_given_up_one_still_completes(rig: Rig) -> None:
    rig.faults.hold = {0, 1}
    rig.start(
        order(prefill(((5,),), request_id="p-1", tokens=4), (2,), request_id="d-1", seconds=0.05),
        order(prefill(((6,),), request_id="p-2", tokens=4), (9,), request_id="d-2"),
    )
    results = rig.results(2)
    assert (results.received, results.failed) == ({"d-1", "d-2"}, {"d-1"})
    assert rig.same((9,), (6,))
    assert rig.untouched(2)


def test_failures_of_a_neighbour_do_not_use_up_a_loads_own_tries(rig: Rig) -> None:
    """Three loads one after the other are given up beside it; it is posted four times and completes."""
    rig.faults.hold = set(range(7))
    rig.start(order(prefill(((6,),), tokens=4), (9,), request_id="patient"))
    for n in range(3):
        rig.start(order(prefill(((5,),), tokens=4), (2,), request_id=f"d-{n}", seconds=0.02))
        assert rig.results().failed == {f"d-{n}"}
    for number in range(7, 20):
        rig.faults.release(number)
    rig.faults.hold.clear()
    assert rig.results().failed == set()
    assert rig.same((9,), (6,))


def test_a_peer_that_goes_takes_its_loads_with_it(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    eventually(lambda: rig.gates.opened)
    rig.script.push(PeerGone(engine_id="p", generation="gen-1", reason="its worker tp0 was killed"))
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "peer p is gone: its worker tp0 was killed"}
    rig.faults.release(0)
    assert rig.untouched(2, 9)


def test_another_generations_end_changes_nothing(rig: Rig) -> None:
    rig.script.push(PeerGone(engine_id="p", generation="gen-0", reason="long ago"))
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == set()


def test_a_peer_that_restarted_is_asked_for_and_the_old_blocks_are_a_miss(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),), generation="gen-0"), (2, 9)))
    (asked,) = rig.script.asked(GetPeer)
    asked.answer(ready(rig.card, "gen-1"))
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "peer p is generation gen-1 now, the blocks are of generation gen-0"}


def test_loads_on_the_way_end_when_the_peer_restarts(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    eventually(lambda: rig.decoder._peers.pull_threads["p"]._active)
    rig.script.push(ready(rig.card, "gen-2"))
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "peer p restarted as generation gen-2"}


@pytest.mark.parametrize(
    ("blocks", "cause"),
    [
        (((5,),), "group 0"),
        (((5, 99),), "only 16 blocks"),
        (((5, -3),), "block ids -3..5"),
        (((5, 1 << 70),), "too large"),
        ((), "no blocks given for remote group 0"),
    ],
)
def test_blocks_that_do_not_fit_the_plan_are_a_miss(
    rig: Rig, blocks: tuple[tuple[int, ...], ...], cause: str
) -> None:
    rig.start(order(prefill(blocks), (2, 9)))
    assert rig.results().failed == {"d-1"}
    assert cause in rig.causes()["d-1"]
    rig.start(order(prefill(((5, 6),)), (2, 9), request_id="d-2"))
    assert rig.results().failed == set(), "and the lane goes on"


def test_a_peer_that_does_not_fit_is_named_in_every_miss() -> None:
    rig = Rig()
    other = Rig(cache_config(BLOCKS, (full(), ("l0", "other"))))
    rig.script.push(ready(other.card))
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    assert "peer p does not fit: layer l1" in rig.causes()["d-1"]
    rig.close()
    other.close()


def test_one_group_reports_blocks_and_several_report_requests(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9), refused="no such thing"))
    results = rig.results()
    assert (results.received, results.failed, results.bad_blocks) == ({"d-1"}, {"d-1"}, {2, 9})
    two = Rig(cache_config(BLOCKS, (full(), ("l0",)), (full(), ("l1",))))
    two.start(order(prefill(((5,), (6,))), (2,), (9,), refused="no such thing"))
    results = two.results()
    assert (results.received, results.failed) == ({"d-1"}, {"d-1"})
    assert two.causes() == {"d-1": "no such thing"}
    two.close()


def test_a_lease_that_ran_out_before_the_load_began_is_a_miss(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9), seconds=-0.1))
    rig.results()
    assert rig.causes() == {"d-1": "the lease on its blocks ran out before the load began"}
    assert rig.gates.closed == 0


def test_freed_blocks_are_passed_on_as_sent(rig: Rig) -> None:
    rig.decoder.start(StepOrders(freed=["a", "b"]))
    assert rig.decoder.results().sent == {"a", "b"}
    assert rig.decoder.results().sent == set()


def test_a_dropped_load_that_is_posted_runs_on_and_one_that_is_not_ends(rig: Rig) -> None:
    go_on, reached = rig.gates.stop("submit")
    rig.start(order(prefill(((5,),), tokens=4), (2,), request_id="posted"))
    assert reached.wait(10)
    rig.start(order(prefill(((6,),), tokens=4), (9,), request_id="behind"))
    rig.decoder.start(StepOrders(dropped=["behind", "posted", "somebody elses"]))
    go_on.set()
    assert rig.results(2).failed == {"behind"}
    assert rig.causes() == {"behind": "the request is over", "posted": ""}
    assert rig.same((2,), (5,))
    assert rig.untouched(9)
    assert rig.gates.opened == 1


def test_the_worker_presents_its_card(rig: Rig) -> None:
    card = rig.script.card()
    assert isinstance(card, RegisterWorker)
    assert (card.card.engine.engine_id, card.card.rank.tp, card.card.backend) == ("d", 0, "memory")
    assert card.card.incarnation == rig.decoder.incarnation


# --- the end ---


def test_closing_gives_up_what_is_on_the_way(rig: Rig) -> None:
    rig.faults.hold = {0}
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    eventually(lambda: rig.decoder._peers.pull_threads["p"]._active)
    rig.decoder.close()
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "the engine is shutting down"}
    assert rig.gates.closed == rig.gates.opened
    assert rig.script.closed
    assert rig.backend.closed
    assert not [t for t in threading.enumerate() if t.name in ("kvd-watch", "kvd-lane-p") and _of(rig, t)]


def test_a_peer_for_which_the_system_starts_no_thread_is_a_miss_and_the_step_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.decoder._peers.pull_threads.pop("p").stop()
    refuse_threads(monkeypatch, "kvd-lane")
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "the thread of peer p: RuntimeError: can't start new thread"}


def test_nothing_begins_after_the_close(rig: Rig) -> None:
    rig.decoder.close()
    rig.script.push(ready(rig.card, "gen-2"))
    rig.start(order(prefill(((5, 6),), generation="gen-2"), (2, 9)))
    rig.start(order(prefill(((5, 6),)), (2, 9), request_id="d-2"))
    for asked in rig.script.asked(GetPeer):
        asked.answer(ready(rig.card, "gen-2"))
    assert rig.results(2).failed == {"d-1", "d-2"}
    assert set(rig.causes().values()) == {"the engine is shutting down"}


def test_memory_stays_registered_while_a_lane_is_at_work(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvd.worker.worker.CLOSE_SECONDS", 1.0)
    go_on, reached = rig.gates.stop("submit")
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert reached.wait(10)
    with caplog.at_level(logging.ERROR):
        rig.decoder.close()
    assert "shutting down with lanes at work (p)" in caplog.text
    assert not rig.backend.closed
    go_on.set()
    assert rig.results().received == {"d-1"}


def _of(rig: Rig, thread: threading.Thread) -> bool:
    of_peers = [one._thread._thread for one in rig.decoder._peers.pull_threads.values()]
    return thread in (*of_peers, rig.decoder._peers._watch._thread)
