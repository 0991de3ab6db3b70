"""What an engine counts of transfers for its own metrics: each once, whoever it was that knew of it."""

from __future__ import annotations

import pytest

from kvd.wire.lease import LeaseEnded
from kvd.wire.transfer import TransferRecord
from kvd.worker.cause import REQUEST_OVER
from kvd.worker.tally import MOST_KEPT, Counted, TransferTally
from tests.support.rigs.bench import eventually, order, prefill
from tests.support.rigs.half import PREFILL_HERE, Engine, from_prefiller
from tests.support.rigs.pull import Rig


def test_a_pull_that_came_has_its_times_bytes_and_descriptors(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    (record,) = eventually(rig.records)
    counted = rig.decoder.tally.take()
    assert counted is not None
    (moved,) = counted.moved
    assert (moved.nbytes, moved.descriptors) == (record.bytes, record.coalesced_descriptors)
    assert moved.post_seconds == record.stages["post"]
    assert moved.seconds == record.stages["post"] + record.stages["wire"]
    assert record.bytes > 0
    assert (counted.failed, counted.expired) == (0, 0)
    assert rig.decoder.tally.take() is None, "each is counted once"


def test_a_miss_is_a_failure_and_moved_nothing(rig: Rig) -> None:
    rig.start(order(prefill(((5, 6),)), (2, 9), refused="no"))
    rig.results()
    eventually(rig.records)
    assert rig.decoder.tally.take() == Counted(failed=1)


def test_a_load_that_nobody_waited_for_is_no_failure() -> None:
    tally = TransferTally()
    tally.note(record(state="miss", code=REQUEST_OVER.code))
    assert tally.take() is None


def test_of_a_push_only_the_prefiller_knows_what_was_posted() -> None:
    tally = TransferTally()
    tally.note(record(mode="push", bytes=7, stages={"wait": 3.0, "wire": 0.5}))
    counted = tally.take()
    assert counted is not None
    assert [(m.seconds, m.post_seconds, m.nbytes, m.descriptors) for m in counted.moved] == [
        (0.5, None, 7, None)
    ]


def test_an_engine_that_never_asks_does_not_fill_up() -> None:
    tally = TransferTally()
    for _ in range(MOST_KEPT + 5):
        tally.note(record())
    counted = tally.take()
    assert counted is not None
    assert len(counted.moved) == MOST_KEPT


def test_a_claim_that_no_worker_hears_of_is_counted_by_the_scheduler() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller() | {"remote_engine_id": None})
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert engine.half.tally.take() == Counted(failed=1)


@pytest.mark.parametrize(("end", "expired"), [("expired", 1), ("released", 0)])
def test_a_prefill_that_nobody_fetched_is_counted_once(end: str, expired: int) -> None:
    engine = Engine("p")
    request = engine.arrive(PREFILL_HERE)
    request.num_computed_tokens = 10
    assert engine.half.finished(request, ([1, 2, 3],), completed=True)[0]
    for _ in range(2):
        engine.script.push(LeaseEnded(request_id="r", end=end))  # type: ignore[arg-type]
    engine.half.step_orders()
    counted = engine.half.tally.take()
    assert (counted.expired if counted else 0) == expired


def test_a_lease_that_ends_by_our_own_clock_is_counted_too() -> None:
    engine = Engine("p", lease_seconds=0.1, lease_grace=0.0, lease_margin=0.0)
    request = engine.arrive(PREFILL_HERE)
    request.num_computed_tokens = 10
    engine.half.finished(request, ([1, 2, 3],), completed=True)
    eventually(lambda: engine.half.step_orders().freed)
    assert engine.half.tally.take() == Counted(expired=1)


def record(**changes: object) -> TransferRecord:
    plain: dict[str, object] = {
        "transfer_id": "t",
        "request_id": "r",
        "local_engine": "d",
        "local_rank": "tp0",
        "remote_engine": "p",
        "remote_generation": "g",
        "remote_request_id": "x",
        "backend": "memory",
        "mode": "pull",
        "state": "done",
    }
    return TransferRecord(**{**plain, **changes})  # type: ignore[arg-type]
