"""A plan and one request's block ids become descriptors.

An outer sum in numpy, blocks times rows, without a Python loop over either; runs of adjacent blocks are found before
they are multiplied by layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvd.topology.blocks import BlockList
from kvd.topology.descriptors import Descriptors, Int64, coalesce, concatenate
from kvd.topology.pairing import PairedBlocks, pair_blocks, phased
from kvd.topology.plan import Plan
from kvd.topology.reads import Mask, Read


def compile_plan(
    plan: Plan, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], *, tokens: int
) -> dict[int, Descriptors]:
    """Descriptors for one request, coalesced, by position of the remote worker.

    ``local`` and ``remote`` give the blocks of each group by group index; groups that ``local`` leaves out are not
    read. ``tokens`` is how many tokens of the request the remote side has: blocks that begin after them are left alone.
    Of a windowed group the remote blocks before the window may be missing. Raises `BlockMismatch` where a needed remote
    block is not given, an id is out of range or a local id is given twice.
    """
    parts: dict[int, list[Descriptors]] = {}
    split: dict[int, list[Descriptors]] = {}
    for paired in pair_blocks(plan, local, remote, tokens):
        (split if phased(paired.read) else parts).setdefault(paired.read.remote, []).append(coalesced(paired))
    for position, found in split.items():
        parts.setdefault(position, []).append(coalesce(concatenate(found)))
    return {position: concatenate(found) for position, found in parts.items()}


def coalesced(paired: PairedBlocks) -> Descriptors:
    """Outer sum of blocks and rows. Rows that fill their stride on both sides continue from block to block."""
    read, mine, theirs = paired.read, paired.mine, paired.theirs
    whole, count = read.filling
    parts = []
    if count:
        starts = np.concatenate(([0], paired.breaks.nonzero()[0] + 1))
        run = np.diff(starts, append=len(mine))
        parts.append(_outer(read, whole, mine[starts], theirs[starts], run))
    if count < len(whole):
        parts.append(_outer(read, ~whole, mine, theirs, np.ones(len(mine), np.int64)))
    return concatenate(parts)


def left_over(paired: PairedBlocks) -> int:
    """How many descriptors `coalesced` gives."""
    whole, rows = paired.read.filling[1], len(paired.read.rows)
    return whole * (1 + int(np.count_nonzero(paired.breaks))) + (rows - whole) * len(paired.mine)


def _outer(
    read: Read,
    which: Mask,
    mine: Int64,
    theirs: Int64,
    blocks: Int64,
) -> Descriptors:
    rows = read.rows
    return Descriptors(
        (rows.local[which][:, None] + mine * read.local_stride).ravel(),
        (rows.remote[which][:, None] + theirs * read.remote_stride).ravel(),
        (rows.length[which][:, None] * blocks).ravel(),
    )
