"""What is copied: shuffled pieces of one length, unequal TP, several groups, odd lengths."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu_direct.owner import LARGE, Owner
from benchmarks.gpu_direct.reader import Reader
from kvd.topology.grid import BlockSelection, Grid, RowBlocks


def pieces(
    reader: Reader, peer: Owner, length: int, count: int, seed: int = 0, stride: int = 0
) -> BlockSelection:
    """``count`` shuffled pieces of one length between the large tensors: eight rows over as many blocks as fit."""
    rows, stride = 8, stride or length
    blocks = LARGE // (rows * stride)
    row = np.arange(rows, dtype=np.int64)
    grid = Grid(
        reader.memory[0].data_ptr() + row * blocks * stride,
        peer.addresses[0] + row * blocks * stride,
        np.full(rows, length, np.int64),
        np.full(rows, stride, np.int64),
        np.full(rows, stride, np.int64),
        blocks,
        blocks,
    )
    return picked(grid, min(count // rows, blocks), seed)


def picked(grid: Grid, blocks: int, seed: int = 0) -> BlockSelection:
    """All rows of a grid in ``blocks`` random blocks on both sides."""
    dice = np.random.default_rng(seed)
    mine = dice.permutation(grid.local_blocks)[:blocks].astype(np.int32)
    theirs = dice.permutation(grid.remote_blocks)[:blocks].astype(np.int32)
    return BlockSelection(grid, (RowBlocks(0, len(grid), mine, theirs),), int(grid.length.sum()) * blocks)


def halved(reader: Reader, peer: Owner) -> BlockSelection:
    """Unequal TP: of each of 16 tokens of a page of 64 KiB, the second half of its heads; blocks of other sizes."""
    token = np.arange(16, dtype=np.int64)
    blocks = LARGE // (64 << 10)
    return picked(
        Grid(
            reader.memory[0].data_ptr() + token * 2048,
            peer.addresses[0] + token * 4096 + 2048,
            np.full(16, 2048, np.int64),
            np.full(16, 32 << 10, np.int64),
            np.full(16, 64 << 10, np.int64),
            2 * blocks,
            blocks,
        ),
        8192,
    )


def groups(reader: Reader, peer: Owner) -> BlockSelection:
    """Rows of several groups, in both tensors: pages of 64 KiB, states of 300 bytes and of 36 KiB, odd bits."""
    here, there = ([t.data_ptr() for t in reader.memory], peer.addresses)
    rows = [  # tensor, offset here and there, length, strides
        *((0, layer << 27, layer << 27, 64 << 10, 64 << 10, 64 << 10) for layer in range(6)),
        *((1, layer << 20, layer << 20, 300, 304, 304) for layer in range(6)),
        *(
            (0, (7 << 27) + (layer << 26), (7 << 27) + (layer << 26), 36868, 40960, 36868)
            for layer in range(2)
        ),
        (1, 32 << 20, 33 << 20, 7 * 4, 32, 64),
    ]
    table = np.array(rows, np.int64)
    blocks = 1400
    return picked(
        Grid(
            np.array(here, np.int64)[table[:, 0]] + table[:, 1],
            np.array(there, np.int64)[table[:, 0]] + table[:, 2],
            table[:, 3],
            table[:, 4],
            table[:, 5],
            blocks,
            blocks,
        ),
        1024,
    )


def bytewise(reader: Reader, peer: Owner) -> BlockSelection:
    """Lengths and addresses that are multiples of nothing."""
    row = np.arange(4, dtype=np.int64)
    grid = Grid(
        reader.memory[1].data_ptr() + 3 + row * (13 << 20),
        peer.addresses[1] + 1 + row * (13 << 20),
        np.array([301, 7, 5003, 2048], np.int64),
        np.full(4, 5003, np.int64),
        np.full(4, 5005, np.int64),
        2000,
        2000,
    )
    return picked(grid, 1500)
