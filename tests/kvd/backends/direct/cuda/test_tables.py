"""What the kernel of direct reads is told, applied in Python and by Triton's interpreter: every byte, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.backends.direct.cuda.tables import (
    SEGMENT_WORDS,
    SHAPES,
    TILE,
    WIDTHS,
    Job,
    Rows,
    job_of_blocks,
    job_of_descriptors,
    rows_of,
)
from kvd.backends.errors import TransferRefused
from kvd.backends.regions import RegisteredMemory, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Grid, RowBlocks
from tests.support.direct_gpu import run_job

GAP = 48


@dataclass
class Pair:
    """Two memories, and a grid between them whose rows stand ``shift`` bytes from a multiple of 16."""

    local: Any
    remote: Any
    grid: Grid

    @property
    def memory(self) -> tuple[RegisteredMemory, RegisteredMemory]:
        return tuple(RegisteredMemory([Region(m.ctypes.data, len(m))]) for m in (self.local, self.remote))  # type: ignore[return-value]

    def rows(self) -> Rows:
        return rows_of(self.grid, *self.memory)

    def selection(self, mine: Any, theirs: Any) -> BlockSelection:
        return self.parts((0, len(self.grid), mine, theirs))

    def parts(self, *parts: tuple[int, int, Any, Any]) -> BlockSelection:
        """Of each part first row, rows, and blocks on both sides."""
        made = tuple(
            RowBlocks(first, rows, np.array(mine, np.int32), np.array(theirs, np.int32))
            for first, rows, mine, theirs in parts
        )
        size = sum(
            int(self.grid.length[p.first_row : p.first_row + p.rows].sum()) * len(p.mine) for p in made
        )
        return BlockSelection(self.grid, made, size)

    def expected(self, rows: Descriptors) -> Any:
        image = self.local.copy()
        here, there = rows.local - self.local.ctypes.data, rows.remote - self.remote.ctypes.data
        for to, source, length in zip(here, there, rows.length, strict=True):
            image[to : to + length] = self.remote[source : source + length]
        return image


def pair(lengths: list[int], blocks: int = 7, remote_blocks: int = 9, shift: int = 0) -> Pair:
    dice = np.random.default_rng(len(lengths))
    each = np.array(lengths, np.int64)
    unit = 1 if shift % 4 else 16
    starts = np.concatenate(([0], np.cumsum(-(-each // unit) * unit + GAP)[:-1]))
    stride = int(starts[-1] + each[-1]) + GAP
    stride = -(-stride // unit) * unit
    here = np.zeros(stride * blocks + 2 * GAP, np.uint8)
    there = dice.integers(1, 256, stride * remote_blocks + 2 * GAP).astype(np.uint8)
    base = [m.ctypes.data + -m.ctypes.data % 16 + shift for m in (here, there)]
    strides = np.full(len(each), stride)
    return Pair(
        here, there, Grid(base[0] + starts, base[1] + starts, each, strides, strides, blocks, remote_blocks)
    )


def copied(two: Pair, rows: Rows, job: Job, expected: Any) -> None:
    assert job.words.dtype == np.int32
    assert run_job(rows, job) == int((expected != 0).sum())  # every byte once: no source byte is zero
    assert (two.local == expected).all()


@pytest.mark.parametrize(
    ("lengths", "shift", "item", "width"),
    [
        ([65536, 65536], 0, 8, WIDTHS[0]),
        ([4096] * 5, 0, 8, WIDTHS[1]),
        ([65536, 2048, 65536], 0, 8, WIDTHS[0]),
        ([2048, 304, 16, 4096, 2048, 304], 0, 8, WIDTHS[1]),
        ([300, 60, 12, 300], 0, 4, WIDTHS[1]),
        ([16384, 300], 4, 4, WIDTHS[1]),
        ([301, 7, 40000, 1, 2048], 3, 1, WIDTHS[1]),
    ],
)
def test_picks_of_rows_of_any_length(lengths: list[int], shift: int, item: int, width: int) -> None:
    two = pair(lengths, shift=shift)
    dice = np.random.default_rng(3)
    selection = two.selection(dice.permutation(7)[:5], dice.permutation(9)[:5])
    rows, expected = two.rows(), two.expected(selection.descriptors())
    job = job_of_blocks(rows, selection)
    assert (job.shape.item, job.shape.width) == (item, width)
    assert job.shape in SHAPES
    copied(two, rows, job, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_blocks_of_any_rows(data: st.DataObject) -> None:
    """As the reads of a plan pick them: each has rows of its own, and blocks of its own."""
    lengths = data.draw(st.lists(st.integers(0, 40000), min_size=1, max_size=6))
    two = pair(lengths, shift=data.draw(st.sampled_from([0, 1, 4, 8])))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(lengths) - 1)), max_size=2)))
    dice = np.random.default_rng(data.draw(st.integers(0, 99)))
    parts = []
    for first, end in pairwise([0, *(cut for cut in cuts if cut < len(lengths)), len(lengths)]):
        count = data.draw(st.integers(0, 7))
        parts.append((first, end - first, dice.permutation(7)[:count], dice.integers(0, 9, count)))
    selection = two.parts(*parts)
    rows, descriptors = two.rows(), selection.descriptors()
    assert (len(selection), selection.nbytes) == (len(descriptors), descriptors.nbytes)
    copied(two, rows, job_of_blocks(rows, selection), two.expected(descriptors))


def test_descriptors_are_rows_of_one_block() -> None:
    two = pair([65536, 300, 2048, 12])
    rows = two.selection(np.array([1, 5]), np.array([8, 0])).descriptors()
    expected = two.expected(rows)
    copied(two, *job_of_descriptors(checked(rows, *two.memory, backend="direct")), expected)


@pytest.mark.parametrize(
    ("lengths", "segments"),
    [
        ([300, 40000] * 8, 2),
        ([300] * 5, 1),
        ([300, 0, 300, 0], 1),
        ([300, 300, 40000, 300], 3),
        ([2040, 2048, 2000], 1),
    ],
)
def test_rows_of_as_many_pieces_at_one_distance_are_one_segment(lengths: list[int], segments: int) -> None:
    two = pair(lengths)
    blocks = np.arange(7)
    selection = two.selection(blocks, blocks[::-1])
    job = job_of_blocks(two.rows(), selection)
    assert job.segments == segments
    copied(two, two.rows(), job, two.expected(selection.descriptors()))


def test_many_runs_of_a_few_lengths_are_a_few_segments() -> None:
    two = pair([300, 40000, 2048] * 6)
    rows = two.selection(np.arange(7), np.arange(7)).descriptors()
    expected = two.expected(rows)
    taken, job = job_of_descriptors(checked(rows, *two.memory, backend="direct"))
    assert job.segments == 2
    copied(two, taken, job, expected)


def test_nothing_to_copy_is_no_tile() -> None:
    two = pair([300])
    job = job_of_blocks(two.rows(), two.selection([], []))
    assert (job.tiles, job.segments, len(job.words)) == (0, 0, 0)


def test_a_request_sends_numbers_of_blocks_and_nothing_else() -> None:
    """64 layers of K and V in one call of the kernel: eight bytes a block, and one segment."""
    two = pair([2048] * 128, blocks=80, remote_blocks=80)
    job = job_of_blocks(two.rows(), two.selection(np.arange(80), np.arange(80)))
    assert job.words.nbytes == 8 * 80 + 4 * SEGMENT_WORDS
    assert job.tiles == 128 * 80 * 2048 // TILE


def test_rows_outside_the_registered_memory_are_refused_by_name() -> None:
    two = pair([300, 2048])
    here, there = two.memory
    less = RegisteredMemory([Region(two.remote.ctypes.data, len(two.remote) - 5000)])
    with pytest.raises(TransferRefused, match=r"remote row 0 of a grid, .* over 9 blocks, is not registered"):
        rows_of(two.grid, here, less)
    with pytest.raises(TransferRefused, match="local row 0"):
        rows_of(two.grid, there, there)
    rows = two.rows()
    with pytest.raises(TransferRefused, match=r"local blocks 0..7 picked of a grid of 7"):
        job_of_blocks(rows, two.selection([0, 7], [0, 0]))
    with pytest.raises(TransferRefused, match=r"remote blocks -1..3 picked of a grid of 9"):
        job_of_blocks(rows, two.selection([0, 3], [3, -1]))
    with pytest.raises(TransferRefused, match=r"rows 1..2 picked of a grid of 2"):
        job_of_blocks(rows, BlockSelection(two.grid, (RowBlocks(1, 2, *(np.zeros(1, np.int32),) * 2),), 0))
    with pytest.raises(TransferRefused, match="columns differ in length: 1 local, 2 remote"):
        job_of_blocks(rows, two.selection([0], [0, 0]))


def test_remote_addresses_are_those_of_the_mapping() -> None:
    two = pair([300])
    here, _ = two.memory
    region = Region(two.remote.ctypes.data, len(two.remote))
    moved = rows_of(two.grid, here, RegisteredMemory([region], [region.address + (1 << 40)]))
    assert (moved.table[1] == two.grid.remote + (1 << 40)).all()


INTERPRETED = """
import json, sys
import numpy as np, torch
from kvd.backends.direct.cuda.copies import launch
from kvd.backends.direct.cuda.tables import job_of_blocks
from tests.kvd.backends.direct.cuda.test_tables import pair
wrong = []
for lengths, shift, programs in json.loads(sys.argv[1]):
    two = pair(lengths, shift=shift)
    dice = np.random.default_rng(3)
    selection = two.selection(dice.permutation(7)[:5], dice.permutation(9)[:5])
    rows, expected = two.rows(), two.expected(selection.descriptors())
    job = job_of_blocks(rows, selection)
    launch(torch.from_numpy(rows.table), torch.from_numpy(job.words), rows, job, programs)
    wrong.append(int((two.local != expected).sum()))
print(json.dumps(wrong))
"""


@pytest.mark.skipif(
    find_spec("triton") is None or find_spec("torch") is None, reason="needs Triton, which vLLM brings along"
)
def test_the_kernel_does_what_it_is_told() -> None:
    """In Triton's interpreter, in a process of its own: it has to be chosen before the kernel is imported."""
    cases = [
        ([65536, 65536], 0, 3),
        ([2048, 304, 16, 4096], 0, 2),
        ([16384, 300, 60], 4, 1),
        ([301, 7, 20000], 3, 64),
    ]
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * len(cases)
