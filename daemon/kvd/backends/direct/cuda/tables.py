"""What the kernel of direct reads is told: rows once for a plan, numbers of blocks and segments for each request.

Bytes are moved in *pieces*: a cell (a row of the plan in one block) is as many pieces of one width as cover it. Pieces
are grouped in *tiles*, of which each program of the kernel takes every n-th: all move about the same, whatever the plan
looks like. A *segment* is rows of as many pieces each, at one distance in the table, in some blocks; the kernel then
finds a tile's cells by division. Everything here is numpy, and tested without a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from kvd.backends.direct.process import NAME
from kvd.backends.errors import TransferRefused
from kvd.backends.regions import RegisteredMemory
from kvd.topology.columns import fill, largest
from kvd.topology.descriptors import Descriptors, Int64
from kvd.topology.grid import BlockSelection, GivenBlocks, Grid, Int32

TILE = 16 << 10
"""Bytes of a tile: enough under way in 64 programs to fill NVLink, in few enough registers to leave room for others."""
WIDTHS = (16 << 10, 2 << 10)
"""Bytes of a piece: the wider, the less is spent on finding it; the narrower, the less of it is beyond a row's end."""
WASTE = 1.125
"""A wide piece is taken unless it covers more than this times what the narrowest would."""
SEGMENT_WORDS = 8
"""Words of a segment: its first tile, its pieces, pieces of a cell, blocks, first row, rows from one to the next. Then
come where the local block ids stand among all words, and how many words after them the remote ones do."""
_MOST = 1 << 31
_NARROW_IN_WIDE = WIDTHS[0] // WIDTHS[-1]


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
WIDEST = ITEMS[0][0] * ITEMS[0][1]
SHAPES = tuple(Shape(item, lanes, width) for item, lanes in ITEMS for width in WIDTHS)


class Alike(NamedTuple):
    """``rows`` rows, ``step`` from one to the next, that are as many of the narrowest ``pieces`` each."""

    first: int
    rows: int
    step: int
    pieces: int

    def per(self, width: int) -> int:
        """Pieces of ``width`` bytes that cover one of the rows."""
        return -(-self.pieces * WIDTHS[-1] // width)


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
    _alike: dict[tuple[int, int], tuple[Alike, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of rows."""
        return int(self.table.shape[1])

    @property
    def lengths(self) -> Int64:
        """Bytes of each row."""
        lengths: Int64 = self.table[2]
        return lengths

    def alike(self, first: int, count: int) -> tuple[Alike, ...]:
        """``count`` rows from ``first`` on, as few groups of alike ones; none has rows of no bytes."""
        key = (first, count)
        if key not in self._alike:
            self._alike[key] = tuple(_alike(_pieces(self.lengths[first : first + count]), first))
        return self._alike[key]

    def shape(self, groups: Sequence[tuple[Alike, int]], waste: float) -> Shape:
        """How such a kernel moves alike rows in so many blocks."""
        if self.item * self.lanes != WIDEST:
            waste = WASTE
        return Shape(self.item, self.lanes, _width(groups, waste))


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One launch: words for the device (segments, local block ids, remote ones), and what is told by value."""

    packed: bytes
    segments: int
    tiles: int
    shape: Shape

    @property
    def words(self) -> Int32:
        """What is ``packed``."""
        return np.frombuffer(bytearray(self.packed), np.int32)


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


def job_of_blocks(rows: Rows, selection: BlockSelection, waste: float = WASTE) -> Job:
    """The launch that copies the blocks that are picked; ``waste`` as `WASTE`, of a kernel for multiples of 16.

    Raises:
        TransferRefused: columns of unequal length, rows or blocks that the grid lacks, more than a launch takes.
    """
    given = [part for part in selection.parts if isinstance(part, GivenBlocks)]
    if selection.inside and len(given) == len(selection.parts):
        return _job_of_given(rows, given, waste)
    parts = []
    for part in selection.parts:
        here, there = len(part.mine), len(part.theirs)
        if here != there:
            raise TransferRefused(
                f"a selection's columns differ in length: {here} local, {there} remote", backend=NAME
            )
        if not 0 <= part.first_row <= part.first_row + part.rows <= len(rows):
            raise TransferRefused(
                f"rows {part.first_row}..{part.first_row + part.rows - 1} picked of a grid of {len(rows)}",
                backend=NAME,
            )
        if here:
            parts.append((rows.alike(part.first_row, part.rows), part.mine, part.theirs))
    job = _job(rows, parts, waste)
    if selection.inside:
        return job
    ids = job.words[SEGMENT_WORDS * job.segments :]
    half = len(ids) // 2
    for found, count, side in (
        (ids[:half], rows.blocks, "local"),
        (ids[half:], rows.remote_blocks, "remote"),
    ):
        if half and largest(found) >= count:
            raise TransferRefused(
                f"{side} blocks {int(found.min())}..{int(found.max())} picked of a grid of {count}",
                backend=NAME,
            )
    return job


def _job_of_given(rows: Rows, parts: Sequence[GivenBlocks], waste: float) -> Job:
    """As `_job`, for blocks that were seen to be of the grid, by few calls of libraries."""
    counts = [(rows.alike(part.first_row, part.rows), len(part.here)) for part in parts]
    segments = _segments(rows, counts, waste)
    ids = chain(*(part.here for part in parts), *(part.there for part in parts))
    packed = struct.pack(f"{len(segments.words) + 2 * segments.blocks}i", *segments.words, *ids)
    return Job(packed, len(segments.words) // SEGMENT_WORDS, segments.tiles, segments.shape)


def _counted(pieces: int) -> int:
    if pieces >= _MOST - TILE:
        raise TransferRefused(f"{pieces} pieces are more than one launch takes", backend=NAME)
    return pieces


def job_of_descriptors(descriptors: Descriptors, waste: float = WASTE) -> tuple[Rows, Job]:
    """Rows of their own for descriptors as `kvd.backends.regions.checked` gave them, and the launch for them.

    ``waste`` as of `job_of_blocks`.

    Raises:
        TransferRefused: more than a launch takes.
    """
    columns = (descriptors.local, descriptors.remote, descriptors.length)
    pieces = _pieces(descriptors.length)
    if (pieces[1:] < pieces[:-1]).any():
        # Many lengths in any order would be as many segments as there are rows.
        order = pieces.argsort(kind="stable")
        pieces = pieces[order]
        columns = (columns[0][order], columns[1][order], columns[2][order])
    none = np.zeros(len(pieces), np.int64)
    rows = _rows((*columns, none, none), 1, 1)
    starts = [0, *(np.flatnonzero(pieces[1:] != pieces[:-1]) + 1).tolist(), len(pieces)]
    groups = [Alike(a, b - a, 1, int(pieces[a])) for a, b in pairwise(starts) if a < b and pieces[a]]
    block = np.zeros(1, np.int32)
    return rows, _job(rows, [(groups, block, block)], waste)


def _job(rows: Rows, parts: Sequence[tuple[Sequence[Alike], Int32, Int32]], waste: float) -> Job:
    """Groups of alike rows in the blocks of each part: a segment each, all in pieces of one width."""
    segments = _segments(rows, [(groups, len(mine)) for groups, mine, _ in parts], waste)
    at = len(segments.words)
    table = np.empty(at + 2 * segments.blocks, np.int32)
    table[:at] = segments.words
    for column in (*(mine for _, mine, _ in parts), *(theirs for _, _, theirs in parts)):
        fill(table[at : at + len(column)], column)
        at += len(column)
    return Job(table.tobytes(), len(segments.words) // SEGMENT_WORDS, segments.tiles, segments.shape)


class _Segments(NamedTuple):
    """The words of all segments, in ``tiles`` tiles; behind them come the ids of ``blocks`` blocks, here and there."""

    words: list[int]
    tiles: int
    blocks: int
    shape: Shape


def _segments(rows: Rows, parts: Sequence[tuple[Sequence[Alike], int]], waste: float) -> _Segments:
    """Groups of alike rows, those of each part in so many blocks."""
    shape = rows.shape([(alike, count) for groups, count in parts for alike in groups], waste)
    width, pieces = shape.width, shape.pieces
    words: list[int] = []
    tiles, blocks = 0, sum([count for _, count in parts])
    at = SEGMENT_WORDS * sum([len(groups) for groups, _ in parts])
    for groups, count in parts:
        for alike in groups:
            per = alike.per(width)
            total = _counted(per * alike.rows * count)
            words += (tiles, total, per, count, alike.first, alike.step, at, blocks)
            tiles += -(-total // pieces)
        at += count
    return _Segments(words, tiles, blocks, shape)


def _width(groups: Sequence[tuple[Alike, int]], waste: float) -> int:
    """The widest pieces that do not waste too much, of alike rows in so many blocks."""
    if all(alike.pieces % _NARROW_IN_WIDE == 0 for alike, _ in groups):
        return WIDTHS[0]
    covered = {
        width: sum(alike.per(width) * alike.rows * blocks for alike, blocks in groups) * width
        for width in WIDTHS
    }
    least = min(covered.values())
    return next(width for width in WIDTHS if covered[width] <= waste * least)


def _alike(pieces: Int64, first: int) -> Iterator[Alike]:
    """Rows of as many pieces together where they stand at one distance, as those of layers with two states do."""
    for number in np.unique(pieces[pieces > 0]).tolist():
        at = np.flatnonzero(pieces == number)
        steps = np.diff(at)
        if len(at) == 1 or (steps == steps[0]).all():
            yield Alike(first + int(at[0]), len(at), int(steps[0]) if len(steps) else 1, number)
        else:
            starts = [0, *(np.flatnonzero(steps != 1) + 1).tolist(), len(at)]
            yield from (Alike(first + int(at[a]), b - a, 1, number) for a, b in pairwise(starts))


def _pieces(lengths: Int64) -> Int64:
    """How many of the narrowest pieces cover each."""
    found: Int64 = -(-lengths // WIDTHS[-1])
    return found


def _item(table: Int64) -> tuple[int, int]:
    """The widest item that all addresses, lengths and strides are multiples of."""
    bits = int(np.bitwise_or.reduce(table, axis=None))
    return next((item, lanes) for item, lanes in ITEMS if bits % (item * lanes) == 0)


def _rows(columns: tuple[Int64, ...], blocks: int, remote_blocks: int) -> Rows:
    table = np.stack(columns).astype(np.int64, copy=False)
    return Rows(table, blocks, remote_blocks, *_item(table))


def _columns(grid: Grid) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    return grid.local, grid.remote, grid.length, grid.local_stride, grid.remote_stride
