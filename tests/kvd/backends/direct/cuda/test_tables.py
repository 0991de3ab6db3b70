"""What the kernel of direct reads is told, applied in Python and by Triton's interpreter: every byte, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
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
    job_of_descriptors,
    job_of_selection,
    rows_of,
)
from kvd.backends.errors import TransferRefused
from kvd.backends.regions import RegisteredMemory, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection
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

    def selection(self, mine: Any, theirs: Any) -> Selection:
        row = np.arange(len(self.grid))[:, None]
        return Selection(
            self.grid,
            (row * self.grid.local_blocks + mine).ravel().astype(np.int32),
            (row * self.grid.remote_blocks + theirs).ravel().astype(np.int32),
            int(self.grid.length.sum()) * len(mine),
        )

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
    job = job_of_selection(rows, selection)
    assert (job.shape.item, job.shape.width) == (item, width)
    assert job.shape in SHAPES
    copied(two, rows, job, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cells_of_any_grid(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 40000), min_size=1, max_size=6))
    two = pair(lengths, shift=data.draw(st.sampled_from([0, 1, 4, 8])))
    count = data.draw(st.integers(0, 12))
    dice = np.random.default_rng(data.draw(st.integers(0, 99)))
    cells = dice.permutation(7 * len(lengths))[:count]  # each is written once, in any order
    row, block = cells // 7, cells % 7
    selection = Selection(
        two.grid,
        (row * 7 + block).astype(np.int32),
        (row * 9 + dice.integers(0, 9, len(row))).astype(np.int32),
        int(np.array(lengths)[row].sum()),
    )
    rows, expected = two.rows(), two.expected(selection.descriptors())
    copied(two, rows, job_of_selection(rows, selection), expected)


def test_descriptors_are_rows_of_one_block() -> None:
    two = pair([65536, 300, 2048, 12])
    rows = two.selection(np.array([1, 5]), np.array([8, 0])).descriptors()
    expected = two.expected(rows)
    copied(two, *job_of_descriptors(checked(rows, *two.memory, backend="direct")), expected)


def test_what_alternates_is_put_in_few_segments() -> None:
    two = pair([300, 40000] * 8)
    blocks = np.arange(7)
    selection = two.selection(blocks, blocks)
    order = np.argsort(selection.local % 7, kind="stable")  # block by block, so that lengths alternate
    selection = Selection(two.grid, selection.local[order], selection.remote[order], selection.nbytes)
    job = job_of_selection(two.rows(), selection)
    assert job.segments == 2
    copied(two, two.rows(), job, two.expected(selection.descriptors()))


def test_nothing_to_copy_is_no_tile() -> None:
    two = pair([300])
    job = job_of_selection(two.rows(), two.selection(np.arange(0), np.arange(0)))
    assert (job.tiles, job.segments, len(job.words)) == (0, 0, 0)


def test_a_request_sends_numbers_and_nothing_else() -> None:
    """64 layers of K and V in one call of the kernel: eight bytes a cell, and one segment."""
    two = pair([2048] * 128, blocks=80, remote_blocks=80)
    job = job_of_selection(two.rows(), two.selection(np.arange(80), np.arange(80)))
    assert job.words.nbytes == 8 * 128 * 80 + 4 * SEGMENT_WORDS
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
    with pytest.raises(TransferRefused, match=r"cells 0..14 picked of a grid of 14"):
        job_of_selection(
            rows, Selection(two.grid, np.array([0, 14], np.int32), np.array([0, 0], np.int32), 0)
        )
    with pytest.raises(TransferRefused, match=r"cells -1..3 picked of a grid of"):
        job_of_selection(
            rows, Selection(two.grid, np.array([0, 3], np.int32), np.array([3, -1], np.int32), 0)
        )
    with pytest.raises(TransferRefused, match="columns differ in length: 1 local, 2 remote"):
        job_of_selection(rows, Selection(two.grid, np.array([0], np.int32), np.array([0, 0], np.int32), 0))


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
from kvd.backends.direct.cuda.tables import job_of_selection
from tests.kvd.backends.direct.cuda.test_tables import pair
wrong = []
for lengths, shift, programs in json.loads(sys.argv[1]):
    two = pair(lengths, shift=shift)
    dice = np.random.default_rng(3)
    selection = two.selection(dice.permutation(7)[:5], dice.permutation(9)[:5])
    rows, expected = two.rows(), two.expected(selection.descriptors())
    job = job_of_selection(rows, selection)
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
