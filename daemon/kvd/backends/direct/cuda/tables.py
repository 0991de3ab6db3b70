"""What the kernel of direct reads is told: rows once for a plan, numbers of cells and segments for each request.

Bytes are moved in *pieces*: a cell (a row of the plan in one block) is as many pieces of one width as cover it. Pieces
are grouped in *tiles*, of which each program of the kernel takes every n-th: all move about the same, whatever the plan
looks like. Cells of as many pieces stand side by side in a *segment*; the kernel then finds a tile's cells by
division. Everything here is numpy, and tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvd.backends.direct.process import NAME
from kvd.backends.errors import TransferRefused
from kvd.backends.regions import RegisteredMemory, check_selection
from kvd.topology.descriptors import Descriptors, Int64
from kvd.topology.grid import Grid, Int32, Selection

TILE = 16 << 10
"""Bytes of a tile: enough under way in 64 programs to fill NVLink, in few enough registers to leave room for others."""
WIDTHS = (16 << 10, 2 << 10)
"""Bytes of a piece: the wider, the less is spent on finding it; the narrower, the less of it is beyond a row's end."""
WASTE = 1.125
"""A wide piece is taken unless it covers more than this times what the narrowest would."""
SEGMENT_WORDS = 4
"""Words of a segment: its first tile, its first cell, how many cells, how many pieces a cell is."""
_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel moves bytes: ``lanes`` items of ``item`` bytes at a time, in pieces of ``width`` bytes.

    A kernel is compiled for each shape that comes up, see `SHAPES`.
    """

    item: int
    lanes: int
    width: int

    @property
    def pieces(self) -> int:
        """Of a tile."""
        return TILE // self.width


ITEMS = ((8, 2), (4, 1), (1, 1))
"""(bytes of an item, items that move at a time): for addresses and lengths that are multiples of 16, of 4, of 1."""
SHAPES = tuple(Shape(item, lanes, width) for item, lanes in ITEMS for width in WIDTHS)


@dataclass(frozen=True, eq=False)
class Rows:
    """A grid as the kernel takes it: ``table`` has local and remote addresses, lengths, local and remote strides.

    Five rows of int64, shape (5, rows); remote addresses are those at which this process sees the peer's memory.
    """

    table: Int64
    blocks: int
    remote_blocks: int
    item: int
    lanes: int

    def __len__(self) -> int:
        """Number of rows."""
        return int(self.table.shape[1])

    @property
    def lengths(self) -> Int64:
        """Bytes of each row."""
        lengths: Int64 = self.table[2]
        return lengths

    @cached_property
    def counts(self) -> dict[int, Int32]:
        """For each width of pieces, how many cover each row."""
        return {width: (-(-self.lengths // width)).astype(np.int32) for width in WIDTHS}

    @cached_property
    def alike(self) -> tuple[int, int] | None:
        """Where all rows are of one length: the width of their pieces, and how many cover a row."""
        if not len(self) or not (self.lengths == self.lengths[:1]).all():
            return None
        width = _width(self, np.ones(len(self), np.int64))
        return width, int(self.counts[width][0])


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One launch: ``words`` for the device (local cells, remote cells, segments; int32) and what is told by value."""

    words: Int32
    cells: int
    segments: int
    tiles: int
    shape: Shape


def rows_of(grid: Grid, local: RegisteredMemory, remote: RegisteredMemory) -> Rows:
    """A grid's rows, with every block of every row inside the registered memory of its side.

    Raises:
        TransferRefused: one is not, or a value is negative.
    """
    least = min((int(c.min()) for c in _columns(grid) if len(c)), default=0)
    if least < 0:
        raise TransferRefused(
            f"a grid holds {least}; addresses, lengths and strides are not negative", backend=NAME
        )
    sides = (
        ("local", grid.local, grid.local_stride, grid.local_blocks, local),
        ("remote", grid.remote, grid.remote_stride, grid.remote_blocks, remote),
    )
    for side, address, stride, blocks, memory in sides:
        reach = stride * max(blocks - 1, 0) + grid.length
        row = memory.outside(address, reach)
        if row is not None:
            raise TransferRefused(
                f"{side} row {row} of a grid, {int(reach[row])} bytes at {int(address[row]):#x} over {blocks} blocks,"
                " is not registered",
                backend=NAME,
            )
    here, there, length, stride, remote_stride = _columns(grid)
    columns = (here, remote.seen_at(there), length, stride, remote_stride)
    return _rows(columns, grid.local_blocks, grid.remote_blocks)


def job_of_selection(rows: Rows, selection: Selection) -> Job:
    """The launch that copies the cells that are picked.

    Raises:
        TransferRefused: columns of unequal length, a cell that the grid does not have, more than a launch takes.
    """
    check_selection(selection, backend=NAME)
    return _job(rows, selection.local, selection.remote)


def job_of_descriptors(descriptors: Descriptors) -> tuple[Rows, Job]:
    """Rows of their own for descriptors as `kvd.backends.regions.checked` gave them, and the launch for them."""
    none = np.zeros(len(descriptors), np.int64)
    rows = _rows((descriptors.local, descriptors.remote, descriptors.length, none, none), 1, 1)
    cells = np.arange(len(descriptors), dtype=np.int32)
    return rows, _job(rows, cells, cells)


def _job(rows: Rows, local: Int32, remote: Int32) -> Job:
    """Cells of as many pieces side by side, in segments that begin with a tile each."""
    if not len(local):
        return Job(np.zeros(0, np.int32), 0, 0, 0, Shape(rows.item, rows.lanes, WIDTHS[0]))
    if rows.alike is not None:
        return _job_of_one(rows, local, remote, *rows.alike)
    row = local // np.int32(rows.blocks)
    width = _width(rows, np.bincount(row, minlength=len(rows)))
    each = rows.counts[width][row]
    starts = _starts(each)
    if len(starts) > 2 * len(np.unique(each[starts])):
        order = np.argsort(each, kind="stable")
        local, remote, each = local[order], remote[order], each[order]
        starts = _starts(each)
    per = each[starts].astype(np.int64)
    shape = Shape(rows.item, rows.lanes, width)
    count = np.diff(np.append(starts, len(local)))
    _countable(int((count * per).max()))
    tiles = -(-count * per // shape.pieces)
    header = np.stack((np.cumsum(tiles) - tiles, starts, count, per), axis=1)
    words = np.concatenate((local, remote, header.ravel().astype(np.int32))).astype(np.int32, copy=False)
    return Job(words, len(local), len(header), int(tiles.sum()), shape)


def _job_of_one(rows: Rows, local: Int32, remote: Int32, width: int, per: int) -> Job:
    """The usual one, all rows of one length: a single segment, put together while the request waits."""
    count = len(local)
    shape = Shape(rows.item, rows.lanes, width)
    _countable(count * per)
    words = np.empty(2 * count + SEGMENT_WORDS, np.int32)
    words[:count], words[count:-SEGMENT_WORDS] = local, remote
    words[-SEGMENT_WORDS:] = (0, 0, count, per)
    return Job(words, count, 1, -(-count * per // shape.pieces), shape)


def _countable(pieces: int) -> None:
    """Raise `TransferRefused` for more pieces than the kernel counts in 32 bits."""
    if pieces >= _MOST - TILE:
        raise TransferRefused(f"{pieces} pieces are more than one launch takes", backend=NAME)


def _starts(values: Int32) -> Int64:
    """Where a value differs from the one before; 0 too."""
    starts: Int64 = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    return starts


def _width(rows: Rows, cells: Int64) -> int:
    """The widest pieces that do not waste too much; ``cells`` is how many there are of each row."""
    covered = {width: int((rows.counts[width] * cells).sum()) * width for width in WIDTHS}
    least = min(covered.values())
    return next(width for width in WIDTHS if covered[width] <= WASTE * least)


def _item(table: Int64) -> tuple[int, int]:
    """The widest item that all addresses, lengths and strides are multiples of."""
    bits = int(np.bitwise_or.reduce(table, axis=None))
    return next((item, lanes) for item, lanes in ITEMS if bits % (item * lanes) == 0)


def _rows(columns: tuple[Int64, ...], blocks: int, remote_blocks: int) -> Rows:
    table = np.stack(columns).astype(np.int64, copy=False)
    return Rows(table, blocks, remote_blocks, *_item(table))


def _columns(grid: Grid) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    return grid.local, grid.remote, grid.length, grid.local_stride, grid.remote_stride
