"""Grids: the same rows over all blocks of two workers, described once; a request then picks cells of them by number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvd.topology.descriptors import Descriptors, Int64

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Where each of a plan's rows stands in every block, on both sides.

    Row ``r`` of block ``b`` is ``length[r]`` bytes at ``local[r] + b * local_stride[r]`` here and the same with
    ``remote`` there: it is cell ``r * blocks + b``, with the number of blocks of that side. All columns are int64 and
    of one length. Grids are compared by identity, so that a backend can keep what it made of one.
    """

    local: Int64
    remote: Int64
    length: Int64
    local_stride: Int64
    remote_stride: Int64
    local_blocks: int
    remote_blocks: int

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.length)

    @property
    def numbered(self) -> bool:
        """Whether 32 bits number all cells, as backends want them."""
        return len(self) * max(self.local_blocks, self.remote_blocks) < 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Cells of a grid to copy: cell ``remote[i]`` there to cell ``local[i]`` here (or back, for a write).

    Two columns of one length that name the same row at each position. ``nbytes`` are the bytes in all.
    """

    grid: Grid
    local: Int32
    remote: Int32
    nbytes: int

    def __len__(self) -> int:
        """Number of cells picked."""
        return len(self.local)

    def descriptors(self) -> Descriptors:
        """The same copies by address, one for each cell."""
        grid = self.grid
        row, block = np.divmod(self.local, grid.local_blocks)
        there = self.remote % grid.remote_blocks
        return Descriptors(
            grid.local[row] + block * grid.local_stride[row],
            grid.remote[row] + there * grid.remote_stride[row],
            grid.length[row],
        )
