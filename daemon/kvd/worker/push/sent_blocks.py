"""A request's blocks as messages of a push carry them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvd.client.records import neighbours
from kvd.topology.blocks import BlockList
from kvd.wire.push import BlockRun

MOST_IDS = 1 << 19
"""Ids of all groups together that go out one by one: 2.6 MB of the 4 MiB that a message may have. An older worker reads
these alone."""


def sent_blocks(lists: Mapping[int, BlockList]) -> dict[int, BlockRun]:
    """The blocks of each group: their ids, or runs of neighbours where these are too many and runs are shorter."""
    many = sum(len(blocks.ids) for blocks in lists.values()) > MOST_IDS
    found = {}
    for group, blocks in sorted(lists.items()):
        runs = neighbours(blocks.ids) if many and len(blocks.ids) else ()
        if 0 < 2 * len(runs) < len(blocks.ids):
            found[group] = BlockRun(group, blocks.first, (), runs)
        else:
            found[group] = BlockRun(group, blocks.first, tuple(blocks.ids.tolist()))
    return found


def received_blocks(sent: BlockRun) -> BlockList:
    """What `sent_blocks` made of a group."""
    if not sent.runs:
        return BlockList(sent.first, np.array(sent.ids, np.int64))
    starts, counts = np.array(sent.runs, np.int64).T
    ends = np.cumsum(counts)
    return BlockList(sent.first, np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1]))
