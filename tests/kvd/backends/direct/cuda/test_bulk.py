"""The kernel of bulk copies: where it finds its pieces, compiled for this host; and that NVRTC takes all of it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.backends.direct.cuda import bulk
from kvd.backends.direct.cuda.launch import Kernel, Launcher
from kvd.backends.direct.cuda.tables import SHAPES, WIDTHS, Job, Rows, job_of_blocks
from tests.kvd.backends.direct.cuda.test_launch import MadeUpLibrary
from tests.kvd.backends.direct.cuda.test_tables import Pair, pair

COMPILER = shutil.which("g++")
WARP = 32

# What the kernel does, without a device: a block's warp finds its next pieces side by side, each thread from the
# segment at which its last one was, and one thread moves them in order.
HOST = r"""
#include <cstring>
extern "C" long long run(const long long* table, const int* words, int rows, int segments, int tiles, int programs) {
  long long bytes = 0;
  for (int first = 0; first < programs; ++first) {
    int at[32] = {};
    for (int lane = 0; lane < 32; ++lane)
      for (long long tile = first + (long long)lane * programs; tile < tiles; tile += 32LL * programs) {
        Piece piece;
        at[lane] = place(table, words, rows, segments, (int)tile, at[lane], &piece);
        if (piece.bytes <= 0 || piece.bytes > CHUNK || piece.bytes % 16 || (long long)piece.to % 16 ||
            (long long)piece.from % 16)
          return -1;
        memcpy(piece.to, piece.from, piece.bytes);
        bytes += piece.bytes;
      }
  }
  return bytes;
}
"""


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler, as Triton does")
    folder = tmp_path_factory.mktemp("bulk")
    source, made = folder / "host.cpp", folder / "host.so"
    source.write_text(f'#include "{bulk.SOURCE}"\n{HOST}')
    told = [f"-D{name}={value}" for name, value in bulk.defines().items()]
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *told]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    run = ctypes.CDLL(str(made)).run
    run.restype = ctypes.c_longlong
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int,) * 4)
    return run


def copied(on_host: Any, two: Pair, rows: Rows, job: Job, expected: Any, programs: int) -> None:
    """Every byte once, and no other."""
    assert job.shape == bulk.SHAPE
    table, told = np.ascontiguousarray(rows.table), (len(rows), job.segments, job.tiles)
    moved = on_host(table.ctypes.data, job.packed, *told, min(programs, job.tiles))
    assert moved == int((expected != 0).sum())  # no source byte is zero
    assert (two.local == expected).all()


@pytest.mark.parametrize(
    ("lengths", "programs"),
    [
        ([65536, 65536], 3),
        ([16384, 304, 16, 32768], 2),
        ([8192] * 12, 16),
        ([1 << 20, 8192 + 16], 1),
    ],
)
def test_it_finds_every_piece(on_host: Any, lengths: list[int], programs: int) -> None:
    two = pair(lengths, blocks=40, remote_blocks=50)
    dice = np.random.default_rng(3)
    selection = two.selection(dice.permutation(40)[:37], dice.permutation(50)[:37])
    rows = two.rows()
    job = job_of_blocks(rows, selection, bulk.WASTE)
    copied(on_host, two, rows, job, two.expected(selection.descriptors()), programs)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(512, 4096).map(lambda n: n * 16), min_size=1, max_size=6),
    counts=st.lists(st.integers(0, 30), min_size=2, max_size=2),
    cut=st.integers(0, 6),
    programs=st.integers(1, 24),
)
def test_it_finds_every_piece_of_parts_with_blocks_of_their_own(
    on_host: Any, lengths: list[int], counts: list[int], cut: int, programs: int
) -> None:
    two = pair(lengths, blocks=30, remote_blocks=33)
    dice = np.random.default_rng(len(lengths))
    cut = min(cut, len(lengths))
    ids = [(dice.permutation(30)[:count], dice.integers(0, 33, count)) for count in counts]
    selection = two.parts((0, cut, *ids[0]), (cut, len(lengths) - cut, *ids[1]))
    rows = two.rows()
    job = job_of_blocks(rows, selection, bulk.WASTE)
    if job.tiles:
        copied(on_host, two, rows, job, two.expected(selection.descriptors()), programs)


@pytest.mark.parametrize(
    ("lengths", "shift", "shape"),
    [
        ([8192] * 4, 0, bulk.SHAPE),
        ([16384 + 2048] * 4, 0, bulk.SHAPE),
        ([65536, 2048], 0, bulk.SHAPE),
        ([6144] * 4, 0, SHAPES[1]),
        ([4096] * 4, 0, SHAPES[1]),
        ([8192] * 4, 4, SHAPES[3]),
    ],
)
def test_it_is_for_rows_of_8_kib_and_more_that_are_multiples_of_16(
    lengths: list[int], shift: int, shape: Any
) -> None:
    two = pair(lengths, shift=shift)
    assert job_of_blocks(two.rows(), two.selection([1], [2]), bulk.WASTE).shape == shape


def test_one_piece_is_one_tile_of_it() -> None:
    assert (bulk.SHAPE.pieces, bulk.SHAPE.width) == (1, WIDTHS[0])


def test_it_is_loaded_with_room_for_its_ring() -> None:
    library = MadeUpLibrary()
    kernel = Launcher(0, library).load(b"code", "bulk", Kernel(0, 1 << 17, 32, 16))
    assert kernel == Kernel(7, 1 << 17, 32, 16)
    assert library.loaded == (b"code", b"bulk", 7, 8, 1 << 17)
    assert library.depth == 0


def test_nvrtc_compiles_it(nvrtc: Any) -> None:
    assert bulk.compiled(nvrtc, "sm_90", bulk.SOURCE, bulk.defines()).startswith(b"\x7fELF")
    with pytest.raises(ValueError, match=r"NVRTC gives .* for sm_12345"):
        bulk.compiled(nvrtc, "sm_12345", bulk.SOURCE, bulk.defines())


@pytest.fixture
def nvrtc() -> Any:
    try:
        return bulk.nvrtc()
    except OSError as error:
        pytest.skip(f"needs NVRTC, which torch with CUDA brings along: {error}")


def test_the_source_is_shipped_with_the_package() -> None:
    assert Path(bulk.__file__).with_name("bulk.cu") == bulk.SOURCE
    assert bulk.SOURCE.is_file()
