"""Blocks as records carry them: runs of neighbours, which expand to the same ids in the same order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd.client.records import block_runs
from kvd.topology.blocks import BlockList
from kvd.wire.transfer import BlockRuns


def blocks(*ids: int, first: int = 0) -> BlockList:
    return BlockList(first, np.array(ids, np.int64))


def test_neighbours_make_one_run_in_the_order_of_the_request() -> None:
    assert block_runs({1: blocks(9, 3, 4, 5, 4, first=2), 0: blocks(7)}) == (
        BlockRuns(0, 0, ((7, 1),)),
        BlockRuns(1, 2, ((9, 1), (3, 3), (4, 1))),
    )


def test_a_group_without_blocks_is_left_out() -> None:
    assert block_runs({0: blocks(), 1: blocks(2)}) == (BlockRuns(1, 0, ((2, 1),)),)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_runs_say_exactly_which_blocks(ids: list[int]) -> None:
    [found] = block_runs({0: blocks(*ids)})
    assert [start + n for start, count in found.runs for n in range(count)] == ids
    assert all(a + n != b for (a, n), (b, _) in zip(found.runs, found.runs[1:], strict=False))
