"""What a simple request copies, told by its ids as they were given: the same as planning tells, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from benchmarks.whole_load.cache import Cache
from kvd.backends.direct.cuda.tables import Rows, job_of_blocks, rows_of
from kvd.backends.regions import RegisteredMemory
from kvd.geometry.model import EngineGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.copies import Copies, check_given, compile_blocks, straight_copies
from kvd.topology.errors import BlockMismatch
from kvd.topology.grid import BlockSelection
from kvd.topology.leftover import leftover
from kvd.topology.plan import Plan, plan_worker
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle, samples

BLOCKS, SIZE, ALL = 64, 16, 1 << 40
LAYERS = samples.llama(("a0", "a1"))
STATES = samples.gated_delta_net(("s0", "s1"))


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


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ([("full", 16, None, LAYERS)], [("full", 32, None, samples.llama(("a0", "a1"), block=32))]),
        ([("sliding_window", 16, 64, LAYERS)], [("sliding_window", 16, 64, LAYERS)]),
    ],
    ids=["other blocks", "a window"],
)
def test_plans_whose_blocks_do_not_meet_one_to_one_are_not_straight(mine: Any, theirs: Any) -> None:
    here, there = samples.engine("d", *mine), samples.engine("p", *theirs)
    assert not plan_worker(here.workers[0], here.workers, there.workers).straight


def test_a_plan_that_reads_from_two_workers_is_not_straight() -> None:
    here, there = (
        samples.engine("d", ("full", 16, None, LAYERS)),
        samples.engine("p", ("full", 16, None, LAYERS), tp=2),
    )
    assert not plan_worker(here.workers[0], here.workers, there.workers).straight


def test_states_beside_attention_are_straight() -> None:
    here, there = (
        samples.engine(name, ("full", 16, None, LAYERS), ("mamba", 16, None, STATES)) for name in "dp"
    )
    plan = plan_worker(here.workers[0], here.workers, there.workers)
    groups, told = {0: (1, (5, 3)), 1: (0, (7,))}, ((0, 0), ((4, 6, 2), (1,)))
    made = straight_copies(plan, groups, told, tokens=48, most_bytes=ALL)
    assert made is not None
    (copies,) = made.values()
    by_group = {(read.group, blocks.here, blocks.there) for read, blocks in copies.given}
    assert by_group == {(0, (5, 3), (6, 2)), (1, (7,), (1,))}
    for fewer in ({0: groups[0]}, {1: groups[1]}, {**groups, 1: (0, (7, 8))}, {**groups, 1: (0, ())}):
        assert straight_copies(plan, fewer, told, tokens=48, most_bytes=ALL) is None
    two = ((0, 0), ((4, 6, 2), (1, 2)))
    twice = straight_copies(plan, {**groups, 1: (0, (7, 7))}, two, tokens=48, most_bytes=ALL)
    assert twice is not None
    with pytest.raises(BlockMismatch, match="local group 1: block id 7 is given 2 times"):
        check_given(*twice.values())


@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(cases())
def test_of_any_engines_it_is_what_planning_gives_or_nothing(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request],
) -> None:
    local, remote, rank, asked = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    groups = {index: (blocks.first, tuple(blocks.ids.tolist())) for index, blocks in asked.local.items()}
    count = max(asked.remote, default=-1) + 1
    none = BlockList(0, np.zeros(0, np.int64))
    theirs = [asked.remote.get(index, none) for index in range(count)]
    told = [blocks.first for blocks in theirs], [tuple(blocks.ids.tolist()) for blocks in theirs]
    straight = straight_copies(plan, groups, told, tokens=asked.tokens, most_bytes=ALL)
    event("straight" if straight else "planned")
    if straight is None:
        return
    planned = compile_blocks(plan, asked.local, asked.remote, tokens=asked.tokens)
    assert straight.keys() == planned.keys()
    for position, copies in straight.items():
        other = planned[position]
        assert isinstance(copies.selection, BlockSelection)
        assert isinstance(other.selection, BlockSelection)
        assert (copies.nbytes, copies.runs) == (other.nbytes, other.runs)
        assert (copies.selection.local == other.selection.local).all()
        assert (copies.selection.remote == other.selection.remote).all()
        sides = [
            RegisteredMemory(worker.regions) for worker in (local.workers[rank], remote.workers[position])
        ]
        rows = rows_of(plan.grids[position][0], *sides)
        jobs = [job_of_blocks(rows, one) for one in (copies.selection, other.selection)]
        assert (jobs[0].packed, jobs[0].tiles, jobs[0].shape) == (
            jobs[1].packed,
            jobs[1].tiles,
            jobs[1].shape,
        )
    left = leftover(plan, asked.local, asked.remote, tokens=asked.tokens, computed=asked.computed)
    assert not len(left)


def test_an_id_that_is_given_twice_is_found_afterwards(pair: tuple[Plan, Rows]) -> None:
    plan, _ = pair
    made = straight_copies(plan, {0: (0, (5, 5))}, ((0,), ((3, 4),)), tokens=32, most_bytes=ALL)
    assert made is not None
    with pytest.raises(BlockMismatch, match="local group 0: block id 5 is given 2 times"):
        check_given(*made.values())
