"""Puts a request's blocks into the form in which records of transfers carry them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvd.topology.blocks import BlockList
from kvd.wire.transfer import BlockRuns


def block_runs(lists: Mapping[int, BlockList]) -> tuple[BlockRuns, ...]:
    """The blocks of each group as runs of neighbouring ids, groups in order, those without blocks left out."""
    return tuple(
        BlockRuns(group, blocks.first, neighbours(np.asarray(blocks.ids, np.int64)))
        for group, blocks in sorted(lists.items())
        if len(blocks.ids)
    )


def neighbours(ids: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Ids, of which there is one at least, as runs of neighbours: (first id, how many)."""
    starts = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1))
    counts = np.diff(np.append(starts, len(ids)))
    return tuple(zip(ids[starts].tolist(), counts.tolist(), strict=True))
