"""Which blocks of a request meet in which read of a plan: the step from a plan to what it copies for one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from kvd.topology.blocks import BlockList, window_start
from kvd.topology.columns import distinct, largest
from kvd.topology.descriptors import Int64
from kvd.topology.errors import BlockMismatch
from kvd.topology.plan import Plan
from kvd.topology.reads import Mask, Read


@dataclass(frozen=True, eq=False)
class PairedBlocks:
    """The blocks of one request that meet in one read: ids of local and remote blocks, two columns of one length.

    They are in the order of local ids, whatever order they were given in, unless `pair_blocks` was asked not to: runs
    are then found wherever there are any.
    """

    read: Read
    mine: Int64
    theirs: Int64

    @cached_property
    def breaks(self) -> Mask:
        """Between which two neighbours one run ends and the next begins; in a run both sides count up together."""
        gaps: Mask = (self.mine[1:] - self.mine[:-1] != 1) | (self.theirs[1:] - self.theirs[:-1] != 1)
        return gaps


def pair_blocks(
    plan: Plan,
    local: Mapping[int, BlockList],
    remote: Mapping[int, BlockList],
    tokens: int,
    *,
    ordered: bool = True,
) -> Iterator[PairedBlocks]:
    """Each read of the plan with the blocks that it copies for a request. Raises as `compile_plan`.

    Blocks that are not ``ordered`` stay in the order in which they were given, for who looks for no runs.
    """
    if not ordered:
        yield from _as_given(plan, local, remote, tokens)
        return
    counts = {index: _counts(index, blocks) for index, blocks in local.items()}
    for read in plan.reads:
        if read.group not in local:
            continue
        mine, theirs = read_pairs(plan, read, local[read.group], _remote(read, remote), tokens)
        if not len(mine):
            continue
        if counts[read.group] == "down":
            mine, theirs = mine[::-1], theirs[::-1]
        elif counts[read.group] == "mixed":
            order = mine.argsort()
            mine, theirs = mine[order], theirs[order]
        if mine[0] < 0 or mine[-1] >= plan.local_blocks:
            raise _out_of_range(mine, plan.local_blocks, "local", read.group)
        if largest(theirs) >= plan.remote_blocks[read.remote]:
            raise _out_of_range(theirs, plan.remote_blocks[read.remote], "remote", read.remote_group)
        yield PairedBlocks(read, mine, theirs)


def _as_given(
    plan: Plan, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], tokens: int
) -> Iterator[PairedBlocks]:
    """`pair_blocks` that are not ordered. What holds of all of a group's ids is looked at once for all reads."""
    largest_local = {index: _distinct(index, blocks) for index, blocks in local.items()}
    largest_remote: dict[int, int] = {}
    for read in plan.reads:
        group, other, count = read.group, read.remote_group, plan.remote_blocks[read.remote]
        if group not in local:
            continue
        theirs = _remote(read, remote)
        here, there = read_pairs(plan, read, local[group], theirs, tokens)
        if not len(here):
            continue
        if largest_local[group] >= plan.local_blocks and largest(here) >= plan.local_blocks:
            raise _out_of_range(here, plan.local_blocks, "local", group)
        if other not in largest_remote:
            largest_remote[other] = largest(theirs.ids)
        if largest_remote[other] >= count and largest(there) >= count:
            raise _out_of_range(there, count, "remote", other)
        yield PairedBlocks(read, here, there)


def _remote(read: Read, remote: Mapping[int, BlockList]) -> BlockList:
    if read.remote_group not in remote:
        raise BlockMismatch(
            f"no blocks given for remote group {read.remote_group}, which group {read.group} reads from"
        )
    return remote[read.remote_group]


def in_order(paired: PairedBlocks) -> PairedBlocks:
    """The same, in the order of local ids."""
    if (paired.mine[1:] > paired.mine[:-1]).all():
        return paired
    order = paired.mine.argsort()
    return PairedBlocks(paired.read, paired.mine[order], paired.theirs[order])


def phased(read: Read) -> bool:
    """Whether blocks of different sizes meet: what one phase reads may then continue in the next."""
    return read.phase.local_period > 1 or read.phase.remote_period > 1


def read_pairs(
    plan: Plan, read: Read, local: BlockList, remote: BlockList, tokens: int
) -> tuple[Int64, Int64]:
    """Ids of the local and remote blocks that meet in this read, two columns of one length.

    Raises `BlockMismatch` where a remote block that is needed is not among ``remote``.
    """
    if read.kind == "mamba":
        if len(local.ids) != len(remote.ids):
            raise BlockMismatch(
                f"state group {read.group}: {len(local.ids)} local blocks and {len(remote.ids)} remote ones"
            )
        return local.ids, remote.ids
    phase, size = read.phase, plan.block_sizes[read.group]
    if phase.local_period == phase.remote_period == 1:
        return _equal_blocks(read, size, local, remote, tokens)
    numbers = local.first + np.arange(len(local.ids), dtype=np.int64)
    there, needed = partners(read, size, numbers, remote.first, tokens)
    needed &= numbers % phase.local_period == phase.local
    there, ids = there[needed], local.ids[needed]
    if len(there):
        _given(read, int(there[0]), int(there[-1]), remote, plan.remote_block_sizes[read.remote_group])
    return ids, remote.ids[there - remote.first]


def partners(read: Read, size: int, numbers: Int64, oldest: int, tokens: int) -> tuple[Int64, Mask]:
    """For local blocks of these numbers the remote block that each meets in this read, and whether it is copied.

    Blocks are of ``size`` tokens here, and ``oldest`` is the number of the first block that the remote side has. Local
    blocks that are not of the read's phase mean nothing.
    """
    phase = read.phase
    remote_size = size * phase.local_period // phase.remote_period
    there = (numbers // phase.local_period) * phase.remote_period + phase.remote
    # The tokens that this local block and that remote block share begin at the later of the two blocks.
    needed: Mask = np.maximum(numbers * size, there * remote_size) < tokens
    if read.window is not None:
        # The remote side let go of blocks before the window; they are missed only where the window needs them.
        end = np.minimum((numbers + 1) * size, (there + 1) * remote_size)
        needed &= (there >= oldest) | (end > window_start(read.kind, read.window, tokens))
    return there, needed


def _equal_blocks(
    read: Read, size: int, local: BlockList, remote: BlockList, tokens: int
) -> tuple[Int64, Int64]:
    """`read_pairs` where blocks meet one to one: both columns are slices."""
    first, last = local.first, min(local.first + len(local.ids), -(-tokens // size))
    if read.window is not None:
        first = max(first, min(remote.first, window_start(read.kind, read.window, tokens) // size))
    if first >= last:
        return local.ids[:0], remote.ids[:0]
    _given(read, first, last - 1, remote, size)
    return local.ids[first - local.first : last - local.first], remote.ids[
        first - remote.first : last - remote.first
    ]


def _given(read: Read, first: int, last: int, remote: BlockList, size: int) -> None:
    """Raise `BlockMismatch` unless the remote blocks ``first`` to ``last`` of ``size`` tokens are among those given."""
    end = remote.first + len(remote.ids)
    if first < remote.first or last >= end:
        raise BlockMismatch(
            f"group {read.group} needs the request's remote blocks {first}..{last} of {size} tokens,"
            f" and {remote.first}..{end - 1} were given"
        )


def check_distinct(index: int, blocks: BlockList) -> None:
    """Raise `BlockMismatch` for an id that is given twice."""
    _distinct(index, blocks)


def _distinct(index: int, blocks: BlockList) -> int:
    """The largest id, as `largest` has it; -1 of no ids. Raises `BlockMismatch` for one that is given twice."""
    if not len(blocks.ids):
        return -1
    most = largest(blocks.ids)
    if not distinct(blocks.ids, most):
        _counts(index, blocks)
    return most


def _counts(index: int, blocks: BlockList) -> Literal["up", "down", "mixed"]:
    """Which way the ids count: down where vLLM hands out what it freed. Raises `BlockMismatch` for one given twice."""
    steps = blocks.ids[1:] > blocks.ids[:-1]
    ups = np.count_nonzero(steps)
    if ups == len(steps):
        return "up"
    ids = np.sort(blocks.ids) if ups else blocks.ids
    same = ids[1:] == ids[:-1]
    if same.any():
        twice = ids[1:][same][0]
        times = int(np.count_nonzero(ids == twice))
        raise BlockMismatch(f"local group {index}: block id {int(twice)} is given {times} times")
    return "mixed" if ups else "down"


def _out_of_range(ids: Int64, blocks: int, side: str, group: int) -> BlockMismatch:
    return BlockMismatch(
        f"{side} group {group}: block ids {int(ids.min())}..{int(ids.max())} and only {blocks} blocks"
    )
