"""What a load does not write of its blocks is zero before any of it moves, in pull and in push."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.backends import zeroing
from kvd.backends.errors import BackendError
from kvd.wire.push import PushAnnounce, PushWithdraw
from kvd.worker.cause import text_of
from tests.kvd.topology.test_oracle import cases
from tests.kvd.worker.test_both_sides import Both, both
from tests.support import oracle
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import dense, ids, shrunk
from tests.support.rigs.pull import gather
from tests.support.rigs.send import step

REQUEST = oracle.Request(local={0: ids(5)}, remote={0: ids(1, 2)}, tokens=20)
"""20 tokens: a part of one block of 64 here, one and a part of another of 16 there."""
WRITTEN, ZEROED = slice(0, 32), slice(32, 64)


@pytest.fixture
def sides() -> Iterator[Both]:
    with both(dense("p", block=16), dense("d", block=64)) as made:
        made.rig.fill(REQUEST.remote)
        yield made


def slots(sides: Both, which: slice) -> list[Any]:
    """Those slots of the block, in both layers: heads x slots x bytes."""
    memory = sides.rig.targets[0]
    return [region.reshape(-1, 2, 64, 512)[5, :, which] for region in memory.regions]


def whole(sides: Both) -> bool:
    return sides.rig.as_pulled(REQUEST, decoder=True)


def zeroed_alone(sides: Both) -> bool:
    """Whether what will not be written is zero, and nothing else is changed."""
    mine = oracle.Memory(
        sides.rig.d.workers[0], tuple(np.full_like(r, oracle.UNTOUCHED) for r in sides.rig.targets[0].regions)
    )
    for region in mine.regions:
        region.reshape(-1, 2, 64, 512)[5, :, ZEROED] = 0
    return all(bool((a == b).all()) for a, b in zip(mine.regions, sides.rig.targets[0].regions, strict=True))


def pull(sides: Both) -> None:
    sides.order(REQUEST.local, REQUEST.tokens, pulled=REQUEST.remote)


def push(sides: Both) -> None:
    sides.order(REQUEST.local, REQUEST.tokens)


def test_a_pull_leaves_nothing(sides: Both) -> None:
    pull(sides)
    assert not gather(sides.half, 1).failed
    assert whole(sides)
    assert not any(part.any() for part in slots(sides, ZEROED))


def test_before_a_byte_is_read_the_rest_is_zero(sides: Both) -> None:
    sides.faults.hold = {0, 1}
    pull(sides)
    eventually(
        lambda: (
            sides.half._peers.pull_threads["p"]._active
            and sides.half._peers.pull_threads["p"]._active[0].times.posted
        )
    )
    assert zeroed_alone(sides)
    sides.faults.hold.clear()
    assert not gather(sides.half, 1).failed
    assert whole(sides)


def test_a_read_that_fails_half_way_leaves_zeros_or_data(sides: Both) -> None:
    sides.faults.fail_after = dict.fromkeys(range(10), 1)
    pull(sides)
    assert gather(sides.half, 1).failed == {"x"}
    assert not any(part.any() for part in slots(sides, ZEROED))


def test_before_a_push_is_announced_the_rest_is_zero(sides: Both) -> None:
    push(sides)
    eventually(lambda: sides.wire.told(PushAnnounce))
    assert zeroed_alone(sides)
    sides.rig.run(step(REQUEST.remote, REQUEST.tokens, REQUEST.tokens))
    assert not gather(sides.half, 1).failed
    assert whole(sides)


@pytest.mark.parametrize("error", [BackendError("the device is gone"), ValueError("of ours")])
@pytest.mark.parametrize("order", [pull, push])
def test_a_load_whose_blocks_cannot_be_zeroed_is_a_miss_with_nothing_read(
    sides: Both, monkeypatch: pytest.MonkeyPatch, order: Any, error: Exception
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(zeroing, "zero", broken)
    order(sides)
    assert gather(sides.half, 1).failed == {"x"}
    outcomes = sides.half.outcomes()
    assert outcomes is not None
    assert str(error) in text_of(outcomes.loads["x"])
    assert sides.untouched()
    if order is push:
        assert sides.wire.told(PushWithdraw)
        assert not sides.wire.told(PushAnnounce)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_is_pulled_leaves_nothing(data: st.DataObject) -> None:
    local, remote, rank, request = data.draw(cases(keeps=True))
    with both(shrunk(remote), shrunk(local), rank) as sides:
        sides.rig.fill(request.remote)
        sides.order(request.local, request.tokens, computed=request.computed, pulled=request.remote)
        results = gather(sides.half, 1)
        assert not results.failed, sides.half.outcomes()
        assert sides.rig.as_pulled(request, rank, decoder=True)
