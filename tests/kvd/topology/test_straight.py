"""What a simple request copies, told by its ids as they were given: the same as planning tells, or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.whole_load.cache import Cache
from kvd.backends.direct.cuda.tables import Rows, job_of_blocks, rows_of
from kvd.backends.regions import RegisteredMemory
from kvd.topology.blocks import BlockList
from kvd.topology.copies import Copies, check_given, compile_blocks, straight_copies
from kvd.topology.errors import BlockMismatch
from kvd.topology.grid import BlockSelection
from kvd.topology.leftover import leftover
from kvd.topology.plan import Plan, plan_worker

BLOCKS, SIZE, ALL = 64, 16, 1 << 40


class Words:
    """Memory of which nothing but its place is asked."""

    device = "cpu"

    def __init__(self, at: int) -> None:
        self._at = at

    def data_ptr(self) -> int:
        return self._at

    def numel(self) -> int:
        return BLOCKS << 17


CACHES = [Cache(Words(at), SIZE, memory) for at in (1 << 40, 1 << 42) for memory in ("block", "layer")]
"""By block and by layer here, and the same there."""


@pytest.fixture(params=[(0, 2), (1, 3), (0, 3)], ids=["block", "layer", "mixed"], scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Plan, Rows]:
    here, there = (CACHES[number] for number in request.param)
    plan = plan_worker(here.geometry, (here.geometry,), (there.geometry,))
    (position,) = plan.sources
    memory = [RegisteredMemory([one.region]) for one in (here, there)]
    return plan, rows_of(plan.grids[position][0], *memory)


def both(plan: Plan, local: Any, remote: Any, tokens: int) -> tuple[Any, Copies]:
    """Straight, and as planning has it."""
    straight = straight_copies(plan, {0: local}, ((remote[0],), (remote[1],)), tokens=tokens, most_bytes=ALL)
    lists = [{0: BlockList(first, np.array(ids, np.int64))} for first, ids in (local, remote)]
    (planned,) = compile_blocks(plan, *lists, tokens=tokens).values()
    assert not len(leftover(plan, *lists, tokens=tokens))
    return straight, planned


@settings(max_examples=40, deadline=None)
@given(first=st.integers(0, 5), oldest=st.integers(0, 5), count=st.integers(1, 30), more=st.integers(0, 5))
def test_it_is_what_planning_gives(
    pair: tuple[Plan, Rows], first: int, oldest: int, count: int, more: int
) -> None:
    plan, rows = pair
    dice = np.random.default_rng(count)
    oldest = min(first, oldest)
    mine = tuple(dice.permutation(BLOCKS)[:count].tolist())
    theirs = tuple(dice.permutation(BLOCKS)[: first - oldest + count + more].tolist())
    tokens = (first + count) * SIZE - 3
    straight, planned = both(plan, (first, mine), (oldest, theirs), tokens)
    (copies,) = straight.values()
    assert list(straight) == list(plan.sources)
    assert (copies.nbytes, copies.runs) == (planned.nbytes, planned.runs)
    for column in ("local", "remote"):
        assert (getattr(copies.selection, column) == getattr(planned.selection, column)).all()
    selections = (copies.selection, planned.selection)
    jobs = [job_of_blocks(rows, one) for one in selections if isinstance(one, BlockSelection)]
    assert (jobs[0].packed, jobs[0].tiles, jobs[0].shape) == (jobs[1].packed, jobs[1].tiles, jobs[1].shape)
    check_given(copies)
    check_given(planned)


@pytest.mark.parametrize(
    ("local", "remote", "tokens", "most"),
    [
        ((0, ()), (0, (1, 2)), 32, ALL),
        ((0, (1, 2)), (0, (1,)), 32, ALL),
        ((0, (1, 2)), (1, (1, 2)), 32, ALL),
        ((0, (1, 2)), (0, (1, 2)), 16, ALL),
        ((0, (1, BLOCKS)), (0, (1, 2)), 32, ALL),
        ((0, (1, -1)), (0, (1, 2)), 32, ALL),
        ((0, (1, 2)), (0, (1, BLOCKS)), 32, ALL),
        ((0, (1, 2)), (0, (1, -1)), 32, ALL),
        ((0, (1, 2)), (0, (1, 2)), 32, 1 << 20),
    ],
    ids=[
        "no blocks", "a remote block is missing", "the first remote block is missing", "a block past the tokens",
        "no such block here", "a negative one here", "no such block there", "a negative one there", "too many bytes",
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_simple_is_left_to_planning(
    pair: tuple[Plan, Rows], local: Any, remote: Any, tokens: int, most: int
) -> None:
    plan, _ = pair
    told = ((remote[0],), (remote[1],))
    assert straight_copies(plan, {0: local}, told, tokens=tokens, most_bytes=most) is None


def test_other_plans_and_groups_are_left_to_planning(pair: tuple[Plan, Rows]) -> None:
    plan, _ = pair
    ids, told = (0, (1, 2)), ((0,), ((3, 4),))
    for groups in ({1: ids}, {0: ids, 1: ids}):
        assert straight_copies(plan, groups, told, tokens=32, most_bytes=ALL) is None
    assert straight_copies(plan, {0: ids}, ((), ()), tokens=32, most_bytes=ALL) is None
    assert replace(plan, reads=plan.reads * 2).straight is None


def test_an_id_that_is_given_twice_is_found_afterwards(pair: tuple[Plan, Rows]) -> None:
    plan, _ = pair
    made = straight_copies(plan, {0: (0, (5, 5))}, ((0,), ((3, 4),)), tokens=32, most_bytes=ALL)
    assert made is not None
    with pytest.raises(BlockMismatch, match="local group 0: block id 5 is given 2 times"):
        check_given(*made.values())
