"""What a request copies where its blocks meet one to one in a single read: the ids as they were given, and no columns.

So it is with most models between workers of one TP size. A thread that slept has none of its code in the processor's
caches: each library that planning calls costs then ten times what it costs in a loop. So this calls none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvd.topology.blocks import BlockList
from kvd.topology.columns import column_of
from kvd.topology.copies import Copies
from kvd.topology.grid import BlockSelection, GivenBlocks
from kvd.topology.pairing import check_distinct
from kvd.topology.plan import Plan


def straight_copies(
    plan: Plan,
    local: Mapping[int, tuple[int, tuple[int, ...]]],
    remote: tuple[Sequence[int], Sequence[tuple[int, ...]]],
    *,
    tokens: int,
    most_bytes: int,
) -> dict[int, Copies] | None:
    """The copies of a request of less than ``most_bytes``, as `kvd.topology.copies.compile_blocks` has them.

    ``local`` are (first, ids) by group, ``remote`` the firsts and the ids of all groups. None where the plan or the
    request is not that simple, or where something is wrong with it: who compiles it otherwise will say what. Whether an
    id is given twice is not looked at, see `check_given`.

    All local blocks are written whole: nothing of them is left over (`kvd.topology.leftover`).
    """
    one = plan.straight
    if one is None or len(local) != 1 or one.group not in local or one.remote_group >= len(remote[1]):
        return None
    first, here = local[one.group]
    oldest, there = remote[0][one.remote_group], remote[1][one.remote_group]
    end, size = first + len(here), len(here) * one.bytes_per_block
    if not here or size >= most_bytes or (end - 1) * one.block_size >= tokens:
        return None
    if first < oldest or end > oldest + len(there):
        return None
    there = there[first - oldest : end - oldest]
    grid = one.grid
    if min(here) < 0 or max(here) >= grid.local_blocks or min(there) < 0 or max(there) >= grid.remote_blocks:
        return None
    part = GivenBlocks(one.first_row, len(grid), here, there)
    selection = BlockSelection(grid, (part,), size, inside=True)
    return {one.read.remote: Copies(selection=selection, given=(one.read, part))}


def check_given(copies: Copies) -> None:
    """Look at what `straight_copies` did not, once the bytes are under way: they land in the request's own blocks only.

    Raises `BlockMismatch` for a local id that is given twice: the load must not complete.
    """
    if copies.given is not None:
        read, blocks = copies.given
        if len(set(blocks.here)) != len(blocks.here):
            check_distinct(read.group, BlockList(0, column_of(blocks.here)))
