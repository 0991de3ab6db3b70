"""Two posts of one layer under way at once: whatever order they end in, nothing is told before it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvctl.engines.sources import planned
from kvd.backends.contract import State
from kvd.geometry.model import EngineGeometry
from kvd.worker.load import state_of
from tests.support import oracle
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, announce, dense, ids, shrunk
from tests.support.rigs.send import Prefiller, SendRig, sending, step

LOOK = "kvd.worker.push.send_step.state_of"


@pytest.fixture
def rig() -> Iterator[SendRig]:
    """What was cached of the prompt is posted and stays under way; then comes what is computed of the same layers."""
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        made.workers[0].faults.hold |= {0}
        announce(made, seconds=500.0)
        made.begin(step(REQUEST.remote, 40, 40, held=32))
        eventually(lambda: posts(made.workers[0]) == 1)
        yield made


def posts(worker: Prefiller) -> int:
    """How many were made."""
    return int(worker.half._backend._inner.submits.__reduce__()[1][0])  # type: ignore[attr-defined]


def compute(rig: SendRig) -> None:
    """All that is left, and wait until the sender has looked at what it posted of that."""
    looked = threading.Semaphore(0)

    def noting(transfer: Any, lane: Any) -> State:
        state = state_of(transfer, lane)
        if state is State.DONE:
            looked.release()
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOOK, noting)
        for layer in ("a", "b"):
            rig.hook(layer)
        rig.stepped()
        rig.end(seconds=500.0)
        for _ in range(2):
            assert looked.acquire(timeout=10.0)
    assert posts(rig.workers[0]) > 1


def test_a_layer_is_not_there_while_an_earlier_post_of_it_is_under_way(rig: SendRig) -> None:
    compute(rig)
    assert rig.there() == set()
    assert rig.sent() == [set()]
    rig.workers[0].faults.release(0)
    eventually(lambda: rig.all_sent("r"))
    assert rig.there() == {("a", 40), ("b", 40)}
    assert rig.as_pulled(REQUEST)


def test_two_that_end_between_looks_at_them_leave_nothing_held(
    rig: SendRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they end in their order: the sender loses its processor after it has seen the first one under way."""
    worker = rig.workers[0]
    worker.faults.hold |= {1, 2}

    def slow(transfer: Any, lane: Any) -> State:
        state = state_of(transfer, lane)
        if state is State.PENDING and posts(worker) > 1:
            for number in range(3):
                worker.faults.release(number)
        return state

    monkeypatch.setattr(LOOK, slow)
    for layer in ("a", "b"):
        rig.hook(layer)
    rig.stepped()
    rig.end(seconds=500.0)
    eventually(lambda: rig.all_sent("r"))
    assert rig.there() >= {("a", 40), ("b", 40)}
    assert rig.as_pulled(REQUEST)


def test_where_the_earlier_one_fails_the_later_one_is_not_there_either(rig: SendRig) -> None:
    rig.workers[0].faults.fail_after[0] = 0
    compute(rig)
    rig.workers[0].faults.release(0)
    eventually(rig.failures)
    eventually(lambda: rig.all_sent("r"))
    assert rig.there() == set()


# --- a rank of which the last chunk has nothing ---


def small(text: str) -> EngineGeometry:
    """An engine of twelve blocks."""
    made = planned("deepseek-v3", text)
    return shrunk(replace(made, workers=tuple(replace(worker, num_blocks=12) for worker in made.workers)))


SHARED = oracle.Request(local={0: ids(3, 4, 5)}, remote={0: ids(1, 2, 7, 8, 9)}, tokens=79)
"""Decode-context ranks take blocks of 16 tokens in turns: the second one has none of the last 15."""


@pytest.fixture
def shared() -> Iterator[SendRig]:
    """What was cached of the prompt is under way to the second of two ranks, and the rest of it computed."""
    here, there = small("tp=1,block_size=16"), small("tp=2,dcp=2,interleave=16,block_size=16")
    with sending(here, there) as made:
        made.fill(SHARED.remote)
        made.workers[0].faults.hold |= {0}
        made.announce(SHARED.local, SHARED.tokens, worker=1, seconds=500.0)
        made.begin(step(SHARED.remote, 79, 79, held=64))
        eventually(lambda: posts(made.workers[0]) == 1)
        made.stepped()
        looks = threading.Semaphore(0)

        def noting(transfer: Any, lane: Any) -> State:
            looks.release()
            return state_of(transfer, lane)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LOOK, noting)
            for _ in range(4):
                assert looks.acquire(timeout=10.0)
        yield made


def test_a_chunk_without_bytes_waits_for_those_before_it(shared: SendRig) -> None:
    assert shared.there(worker=1) == set()
    shared.workers[0].faults.release(0)
    layers = shared.p.workers[0].layers
    eventually(lambda: shared.there(worker=1) == {(layer, 79) for layer in layers})
    assert posts(shared.workers[0]) == 1
    assert shared.as_pulled(SHARED, 1)


def test_a_chunk_without_bytes_does_not_make_up_for_one_that_failed(shared: SendRig) -> None:
    shared.workers[0].faults.fail_after[0] = 0
    shared.workers[0].faults.release(0)
    eventually(lambda: shared.failures(worker=1))
    assert shared.there(worker=1) == set()
