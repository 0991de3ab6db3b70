"""Pushes to a worker that peers cannot write to: it reads each layer as it becomes readable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.wire.push import BlockRun, LayersThere
from kvd.wire.transfer import ReportTransfers
from kvd.worker.orders import StepOrders
from tests.support.rigs.bench import eventually
from tests.support.rigs.push import BLOCKS, PushRig, pushed


@pytest.fixture
def rig() -> Iterator[PushRig]:
    made = PushRig(lands=False)
    yield made
    made.close()


def nothing_yet(rig: PushRig) -> bool:
    thread = rig.decoder._peers.receive_threads["p"]
    eventually(lambda: thread._thread.idle)
    return not rig.decoder.results().received


def test_an_announcement_without_a_window_says_that_we_read(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    (told,) = rig.announced()
    assert told.window == b""
    assert (told.key.attempt, told.blocks) == (0, (BlockRun(group=0, first=0, ids=(2, 9)),))


def test_layers_are_read_as_they_become_readable_and_the_prefiller_is_told_at_the_end(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    eventually(lambda: bool(rig.target.reshape(2, BLOCKS, -1)[0, [2, 9]].all()))
    assert nothing_yet(rig)
    assert rig.done() == []
    rig.readable("l1", 8, 5, 6)
    results = rig.results()
    assert (results.received, results.failed) == ({"d-1"}, set())
    assert rig.same((2, 9), (5, 6))
    assert rig.untouched(*(b for b in range(BLOCKS) if b not in (2, 9)))
    assert [told.key.transfer_id for told in eventually(rig.done)] == ["x"]


def test_chunks_are_read_once_each_in_whichever_order_and_however_often_they_are_told(rig: PushRig) -> None:
    rig.start(pushed((2, 9, 4), tokens=12))
    rig.announced()
    rig.readable("l0", 4, 5)
    rig.readable("l0", 8, 5, 6)
    rig.readable("l0", 4, 5)
    rig.readable("l0", 8, 5, 6)
    rig.readable("l1", 12, 5, 6, 7)
    rig.readable("l1", 4, 5)
    rig.readable("l0", 12, 5, 6, 7)
    rig.readable("l0", 12, 5, 6, 7)
    assert rig.results().failed == set()
    assert rig.same((2, 9, 4), (5, 6, 7))
    submits = next(rig.backend._inner.submits)
    assert submits == 4, "one for each chunk of l0, one for all of l1"


def test_what_is_told_of_all_layers_is_read_as_blocks_and_not_layer_by_layer(
    rig: PushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.worker.push.layer_reads.compile_chunk", None)
    rig.start(pushed((2, 9, 4), tokens=12))
    rig.announced()
    rig.readable(("l0", "l1"), 8, 5, 6)
    rig.readable(("l0", "l1"), 12, 5, 6, 7)
    assert rig.results().failed == set()
    assert rig.same((2, 9, 4), (5, 6, 7))
    assert rig.untouched(*(b for b in range(BLOCKS) if b not in (2, 9, 4)))
    assert next(rig.backend._inner.submits) == 2
    (told,) = eventually(lambda: rig.script.told(ReportTransfers))
    (record,) = told.records
    assert (record.descriptors, record.coalesced_descriptors) == (6, 6)


def test_some_layers_told_ahead_are_read_as_blocks_of_a_plan_that_is_made_once(
    rig: PushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.worker.push.layer_reads.compile_chunk", None)
    for number, (name, mine) in enumerate((("x", (2, 9, 4)), ("y", (1, 3, 8))), 1):
        rig.start(pushed(mine, tokens=12, name=name, request_id=f"d-{name}"))
        rig.announced(number)
        rig.readable(("l0", "l1"), 8, 5, 6, name=name)
        rig.readable("l0", 12, 5, 6, 7, name=name)
        rig.readable("l1", 12, 5, 6, 7, name=name)
        assert rig.results().failed == set()
        assert rig.same(mine, (5, 6, 7))
    assert next(rig.backend._inner.submits) == 6
    remote = rig.decoder.topology.remote("p")
    assert len(remote._parts) == 2


def test_layers_that_are_told_unequal_tokens_are_read_at_once_for_each(
    rig: PushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word takes the place of one that was not heard, and tells of what that told."""
    monkeypatch.setattr("kvd.worker.push.layer_reads.compile_chunk", None)
    rig.start(pushed((2, 9, 4), tokens=12))
    rig.announced()
    rig.readable("l0", 4, 5)
    rig.readable(("l0", "l1"), 12, 5, 6, 7)
    assert rig.results().failed == set()
    assert rig.same((2, 9, 4), (5, 6, 7))
    assert next(rig.backend._inner.submits) == 3


def test_where_no_more_plans_are_kept_layers_are_read_one_by_one(
    rig: PushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.topology.transfer_topology.MOST_PARTS", 0)
    rig.start(pushed((2, 9, 4), tokens=12))
    rig.announced()
    rig.readable("l0", 4, 5)
    rig.readable(("l0", "l1"), 12, 5, 6, 7)
    assert rig.results().failed == set()
    assert rig.same((2, 9, 4), (5, 6, 7))


def test_a_block_that_is_not_full_is_left_for_the_next_chunk(rig: PushRig) -> None:
    rig.start(pushed((2, 9), tokens=7))
    rig.announced()
    rig.readable("l0", 6, 5, 6)
    eventually(lambda: bool(rig.target.reshape(2, BLOCKS, -1)[0, 2].all()))
    assert rig.untouched(9)
    rig.readable("l0", 7, 5, 6)
    rig.readable("l1", 7, 5, 6)
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))


def test_what_is_here_already_is_not_read(rig: PushRig) -> None:
    rig.start(pushed((9,), tokens=8, computed=4))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    rig.readable("l1", 8, 5, 6)
    assert rig.results().failed == set()
    assert rig.same((9,), (6,))
    assert rig.untouched(*(b for b in range(BLOCKS) if b != 9))


def test_each_source_is_read_for_what_it_supplies() -> None:
    rig = PushRig(lands=False, prefill_tp=2)
    rig.start(pushed((2, 9)))
    rig.announced()
    for tp in (1, 0):
        for layer in ("l0", "l1"):
            assert nothing_yet(rig)
            rig.readable(layer, 8, 5, 6, tp=tp)
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))
    rig.close()


def test_a_worker_of_a_larger_engine_reads_its_own_heads() -> None:
    rig = PushRig(lands=False, decode_tp=2)
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    rig.readable("l1", 8, 5, 6)
    assert rig.results().failed == set()
    assert rig.same((2, 9), (5, 6))
    rig.close()


def test_a_read_that_fails_is_tried_again_and_then_a_miss(rig: PushRig) -> None:
    rig.faults.refuse = {0, 1, 2}
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "submit 2 is to be refused"}
    assert rig.withdrawn(), "so that the prefiller need not keep the blocks"
    assert rig.done() == []


def test_a_miss_waits_for_the_reads_under_way(rig: PushRig) -> None:
    rig.faults.hold = {0}
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    eventually(lambda: rig.decoder._peers.pull_threads["p"]._active)
    rig.say(failed="the request was aborted", quiesced=True)
    rig.withdrawn()
    assert nothing_yet(rig), "reported while a read of it may still land"
    rig.faults.release(0)
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "prefiller p/tp0: the request was aborted"}


def test_a_read_that_never_ends_is_given_up_with_its_lane(rig: PushRig) -> None:
    rig.faults.hold = {0}
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    (reading,) = eventually(lambda: list(rig.decoder._peers.pull_threads["p"]._active))
    reading.deadline = 0.0
    assert rig.results().failed == {"d-1"}
    assert rig.gates.closed == 1
    rig.faults.release(0)
    assert rig.untouched(2, 9)


def test_a_peer_that_goes_ends_the_reads_and_the_push(rig: PushRig) -> None:
    rig.faults.hold = {0}
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    eventually(lambda: rig.decoder._peers.pull_threads["p"]._active)
    rig.gone()
    assert rig.results().failed == {"d-1"}
    assert rig.causes() == {"d-1": "peer p is gone: tp0 was killed"}
    rig.faults.release(0)
    assert rig.untouched(2, 9)


def test_a_push_that_nobody_waits_for_ends_with_its_reads(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.decoder.start(StepOrders(dropped=["d-1"]))
    assert rig.results().failed == {"d-1"}
    rig.readable("l0", 8, 5, 6)
    assert nothing_yet(rig)
    assert rig.untouched(2, 9)


@pytest.mark.parametrize(
    ("ids", "cause"),
    [
        ((5,), "group 0 needs the request's remote blocks"),
        ((5, 99), "only 16 blocks"),
        ((5, 1 << 70), "large"),
    ],
)
def test_blocks_that_do_not_fit_are_a_miss(rig: PushRig, ids: tuple[int, ...], cause: str) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, *ids)
    assert rig.results().failed == {"d-1"}
    assert cause in rig.causes()["d-1"]


def test_a_word_without_blocks_reads_nothing(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.say(there=(LayersThere(group=0, layers=("l0", "l1"), tokens=8),))
    assert nothing_yet(rig)


def test_closing_waits_for_the_reads(rig: PushRig) -> None:
    rig.faults.hold = {0}
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    eventually(lambda: rig.decoder._peers.pull_threads["p"]._active)
    rig.decoder.close()
    assert rig.results().failed == {"d-1"}
    assert rig.backend.closed
    assert not rig.decoder._peers.receive_threads["p"]._thread.alive


def test_the_record_counts_what_was_read(rig: PushRig) -> None:
    rig.start(pushed((2, 9)))
    rig.announced()
    rig.readable("l0", 8, 5, 6)
    rig.readable("l1", 8, 5, 6)
    rig.results()
    record = rig.record()
    assert (record.mode, record.state, record.bytes) == ("push", "done", 2 * 2 * (2 * 4 * 8 * 2))
    assert record.coalesced_descriptors > 0
