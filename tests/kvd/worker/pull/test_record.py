"""What a worker writes down of a load: the blocks of both sides, when things happened, how often it was tried."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvd.backends.errors import BackendError
from kvd.backends.memory import MemoryLane
from kvd.wire.transfer import MAX_RUNS, BlockRuns
from tests.support.rigs.bench import eventually, order, prefill
from tests.support.rigs.push import PushRig, pushed

if TYPE_CHECKING:
    from tests.support.rigs.pull import Rig


def test_a_record_names_the_blocks_of_both_sides(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (9, 2)))
    rig.results()
    (record,) = eventually(rig.records)
    assert record.local_blocks == (BlockRuns(0, 0, ((9, 1), (2, 1))),)
    assert record.remote_blocks == (BlockRuns(0, 0, ((5, 2),)),)
    assert not record.blocks_cut


def test_moments_come_in_order_and_span_the_load(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    moments = [
        record.moments[name] for name in ("queued", "planned", "posting", "posted", "last", "reported")
    ]
    assert moments == sorted(moments)
    assert moments[0] <= 0 <= moments[1]
    assert record.moments["first"] <= record.moments["last"]
    assert record.moments["posted"] - record.moments["posting"] == pytest.approx(record.stages["post"])


def test_a_load_that_was_tried_again_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, failures = MemoryLane.submit, iter((BackendError("once"),))

    def failing(*arguments: object) -> object:
        if (error := next(failures, None)) is not None:
            raise error
        return submit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryLane, "submit", failing)
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.state, record.attempts) == ("done", 2)


def test_a_load_that_was_never_tried_has_no_moments_of_moving(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9), refused="no lease"))
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.state, record.attempts) == ("miss", 0)
    assert set(record.moments) == {"queued", "reported"}


def test_runs_beyond_what_a_record_keeps_are_left_out_with_a_mark(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_RUNS >= 1000
    monkeypatch.setattr("kvd.wire.transfer.MAX_RUNS", 1)
    rig.start(order(prefill(((5, 6),)), (9, 2)))
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.blocks_cut, record.local_blocks) == (True, (BlockRuns(0, 0, ((9, 1),)),))


def test_a_push_names_the_decoders_blocks_and_its_own_moments() -> None:
    rig = PushRig()
    try:
        rig.start(pushed((2, 9)))
        (told,) = rig.announced()
        rig.answer()
        for layer in ("l0", "l1"):
            rig.write(layer, told, (5, 6))
        rig.results()
        record = rig.record()
    finally:
        rig.close()
    assert record.local_blocks == (BlockRuns(0, 0, ((2, 1), (9, 1))),)
    assert (record.remote_blocks, record.attempts) == ((), 1)
    moments = [record.moments[name] for name in ("queued", "announced", "taken", "first", "last", "reported")]
    assert moments == sorted(moments)


def test_all_stages_together_are_what_the_load_took(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that failed, and its wait for another, is in no stage of its own."""
    submit, failures = MemoryLane.submit, iter((BackendError("once"),))

    def failing(*arguments: object) -> object:
        if (error := next(failures, None)) is not None:
            raise error
        return submit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryLane, "submit", failing)
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    assert record.attempts == 2
    whole = sum(record.stages.values())
    assert record.moments["last"] - record.moments["queued"] <= whole + 1e-9
    assert whole <= record.moments["reported"] - record.moments["queued"]
    assert record.stages["other"] > 0


# --- why a load missed ---


def test_a_source_that_fails_each_time_is_a_transfer_that_failed(rig: Rig) -> None:
    rig.faults.fail_after = dict.fromkeys(range(9), 0)
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.state, record.code) == ("miss", "TRANSFER_FAILED")
    assert record.attempts > 1


def test_a_load_that_is_not_complete_at_its_deadline_is_too_late(rig: Rig) -> None:
    rig.faults.hold = set(range(9))
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.expire()
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.state, record.code) == ("miss", "TOO_LATE")
    assert record.cause.startswith("not complete within")


def test_a_fault_of_our_own_is_internal_and_says_what_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(MemoryLane, "submit", broken)
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    assert (record.state, record.code) == ("miss", "INTERNAL")
    assert "ZeroDivisionError: oh" in record.cause


def test_a_record_names_the_trace_of_its_request(rig: Rig) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    rig.start(dataclasses.replace(order(prefill(((5, 6),)), (2, 9)), traceparent=parent))
    rig.results()
    (record,) = eventually(rig.records)
    assert record.traceparent == parent
