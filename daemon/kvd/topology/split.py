"""Copies split into pieces of equal size, for several threads to take."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Selection


def split_descriptors(rows: Descriptors, pieces: int) -> list[Descriptors]:
    """The same bytes in at most ``pieces`` lists, in order, whose sizes differ by one byte at most.

    Rows are cut where a piece ends within one; each must have bytes.
    """
    ends = rows.length.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    marks = sorted({total * number // pieces for number in range(pieces + 1)})
    first = ends.searchsorted(marks, side="right").tolist()
    last = ends.searchsorted(marks, side="left").tolist()
    split = []
    for piece, (begin, end) in enumerate(pairwise(marks)):
        a, b = first[piece], last[piece + 1]
        local, remote, length = (c[a : b + 1].copy() for c in (rows.local, rows.remote, rows.length))
        skipped, left = begin - int(ends[a] - length[0]), int(ends[b]) - end
        local[0] += skipped
        remote[0] += skipped
        length[0] -= skipped
        length[-1] -= left
        split.append(Descriptors(local, remote, length))
    return split


def split_selection(selection: Selection | BlockSelection, pieces: int) -> list[Selection]:
    """The same cells in at most ``pieces`` lists, in order, whose numbers of cells differ by one at most."""
    grid, local, remote = selection.grid, selection.local, selection.remote
    marks = sorted({len(selection) * number // pieces for number in range(pieces + 1)})
    if len(marks) < 2:
        return []
    sizes = np.add.reduceat(grid.length[local // grid.local_blocks], marks[:-1]).tolist()
    return [
        Selection(grid, local[a:b], remote[a:b], size)
        for (a, b), size in zip(pairwise(marks), sizes, strict=True)
    ]
