"""Grids: the same rows over all blocks of two workers, described once; a request then picks cells of them by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.topology.descriptors import Descriptors, Int64, concatenate
from kvd.topology.reads import Read

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Where each of a plan's rows stands in every block, on both sides.

    Row ``r`` of block ``b`` is ``length[r]`` bytes at ``local[r] + b * local_stride[r]`` here, and the same with
    ``remote`` there. It is cell ``r * blocks + b``, with the number of blocks of that side. All columns are int64 and
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


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks:
    """``rows`` rows of a grid from ``first_row`` on, all in some blocks: ``theirs[i]`` there to ``mine[i]`` here.

    Two columns of block ids, of one length.
    """

    first_row: int
    rows: int
    mine: Int32
    theirs: Int32

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.mine)


@dataclass(frozen=True, slots=True, eq=False)
class GivenBlocks:
    """As `RowBlocks`, with the ids as they were given: ``there[i]`` to ``here[i]``. Columns are made when asked for."""

    first_row: int
    rows: int
    here: tuple[int, ...]
    there: tuple[int, ...]

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.here)

    @property
    def mine(self) -> Int32:
        """The ids here."""
        return np.array(self.here, np.int32)

    @property
    def theirs(self) -> Int32:
        """The ids there."""
        return np.array(self.there, np.int32)


@dataclass(frozen=True, eq=False)
class BlockSelection:
    """Blocks of a grid to copy, row by row: what a `Selection` is without an entry for each cell.

    A lane that can work with blocks takes ``parts``. Any other finds in ``local`` and ``remote`` the cells that they
    stand for; only a grid that is ``numbered`` has those. ``inside``: whoever made it has seen that all its rows and
    blocks are of the grid.
    """

    grid: Grid
    parts: tuple[RowBlocks | GivenBlocks, ...]
    nbytes: int
    inside: bool = False

    def __len__(self) -> int:
        """Number of cells."""
        return sum([part.rows * len(part) for part in self.parts])

    @cached_property
    def local(self) -> Int32:
        """The cells here."""
        return self._cells(self.grid.local_blocks, [part.mine for part in self.parts])

    @cached_property
    def remote(self) -> Int32:
        """The cells there, each at the position of its own in ``local``."""
        return self._cells(self.grid.remote_blocks, [part.theirs for part in self.parts])

    def descriptors(self) -> Descriptors:
        """The same copies by address, one for each cell."""
        return Selection(self.grid, self.local, self.remote, self.nbytes).descriptors()

    def _cells(self, blocks: int, ids: list[Int32]) -> Int32:
        found = [np.zeros(0, np.int32)]
        for part, block in zip(self.parts, ids, strict=True):
            row = np.arange(part.first_row, part.first_row + part.rows, dtype=np.int32)
            found.append((row[:, None] * np.int32(blocks) + block).ravel())
        return np.concatenate(found)


class Cells(NamedTuple):
    """Of a read's rows in its grid: the first, and cells of block 0 on both sides, two columns of shape (rows, 1)."""

    first_row: int
    local: Int32
    remote: Int32


def grid_of(reads: Sequence[Read], local_blocks: int, remote_blocks: int) -> tuple[Grid, dict[int, Cells]]:
    """The reads from one remote worker as one grid, and the cells of each read (by its id)."""
    counts = [len(read.rows) for read in reads]
    rows = concatenate([read.rows for read in reads])
    grid = Grid(
        rows.local,
        rows.remote,
        rows.length,
        np.repeat(np.array([read.local_stride for read in reads], np.int64), counts),
        np.repeat(np.array([read.remote_stride for read in reads], np.int64), counts),
        local_blocks,
        remote_blocks,
    )
    ends = np.cumsum(counts).tolist()
    cells = {}
    for read, end, count in zip(reads, ends, counts, strict=True):
        # 32 bits hold the cells of every grid that is picked from (`Grid.numbered`).
        row = np.arange(end - count, end, dtype=np.int64)[:, None]
        cells[id(read)] = Cells(
            end - count,
            (row * local_blocks).astype(np.int32),
            (row * remote_blocks).astype(np.int32),
        )
    return grid, cells
