"""A request's blocks as messages of a push carry them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvd.client.records import neighbours
from kvd.topology.blocks import BlockList
from kvd.wire.push import PACKED_BYTES, BlockRun

MOST_IDS = 1 << 19
"""Ids of all groups together that go out one by one: 2.6 MB of the 4 MiB that a message may have. An older worker reads
these alone."""


def sent_blocks(lists: Mapping[int, BlockList]) -> dict[int, BlockRun]:
    """The blocks of each group: their ids; where these are too many, runs of neighbours or packed ids.

    A pool that is in use is fragmented: most blocks of a request have no neighbour then.
    """
    many = sum(len(blocks.ids) for blocks in lists.values()) > MOST_IDS
    return {group: (_shortest if many else _by_ids)(group, blocks) for group, blocks in sorted(lists.items())}


def received_blocks(sent: BlockRun) -> BlockList:
    """What `sent_blocks` made of a group."""
    if sent.packed:
        packed = np.frombuffer(sent.packed, np.uint8).reshape(-1, PACKED_BYTES)
        ids = np.zeros((len(packed), 4), np.uint8)
        ids[:, :PACKED_BYTES] = packed
        return BlockList(sent.first, ids.view("<u4").ravel().astype(np.int64))
    if not sent.runs:
        return BlockList(sent.first, np.array(sent.ids, np.int64))
    starts, counts = np.array(sent.runs, np.int64).T
    ends = np.cumsum(counts)
    return BlockList(sent.first, np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1]))


def _by_ids(group: int, blocks: BlockList) -> BlockRun:
    return BlockRun(group, blocks.first, tuple(blocks.ids.tolist()))


def _shortest(group: int, blocks: BlockList) -> BlockRun:
    """A run takes as many bytes as three packed ids."""
    if not len(blocks.ids):
        return BlockRun(group, blocks.first, ())
    runs = neighbours(blocks.ids)
    if 3 * len(runs) < len(blocks.ids):
        return BlockRun(group, blocks.first, (), runs)
    if int(blocks.ids.max()) >= 1 << 8 * PACKED_BYTES:
        return _by_ids(group, blocks)
    ids = np.asarray(blocks.ids, "<u4").view(np.uint8).reshape(-1, 4)
    return BlockRun(group, blocks.first, (), packed=ids[:, :PACKED_BYTES].tobytes())
