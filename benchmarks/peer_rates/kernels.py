"""Copies by kernels: the one of the direct backend, and some in CUDA C++; and what compute beside them loses."""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peer_rates.pair import PIECES, POOL, SIZES, Pair, ok

SOURCE = Path(__file__).with_name("peer.cu")
_u64, _size, _int, _ptr = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p


def triton(pair: Pair) -> None:
    """The kernel of the direct backend, as it is and otherwise."""
    from kvd.backends.direct.cuda import copies, tables
    from kvd.topology.grid import BlockSelection, Grid, RowBlocks

    stream = pair.streams[0]
    ways = (
        (16, 8, (32, 64, 96, 132)), (32, 8, (48, 64, 132)), (32, 16, (48, 64, 132)),
        (64, 16, (32, 64, 132)), (64, 32, (32, 64)), (16, 4, (64, 132, 264)),
    )  # fmt: skip
    before = tables.TILE, tables.WIDTHS, copies.WARPS
    try:
        for tile, warps, numbers in ways:
            tables.TILE, tables.WIDTHS, copies.WARPS = tile << 10, (tile << 10, 2 << 10), warps
            for piece in PIECES:
                blocks = POOL // piece
                values = pair.here.data_ptr(), pair.there.data_ptr(), piece, piece, piece
                table = np.array(values, np.int64)[:, None]
                grid = Grid(table[0], table[1], table[2], table[3], table[4], blocks, blocks)
                rows = tables.Rows(table, blocks, blocks, 8, 2)
                kept = torch.from_numpy(table).to(pair.device)
                for size in SIZES:
                    ids = pair.chosen(piece, size)
                    job = tables.job_of_blocks(rows, BlockSelection(grid, (RowBlocks(0, 1, *ids),), size))
                    words = torch.from_numpy(job.words).to(pair.device)
                    for programs in numbers:

                        def run(
                            words: Any = words,
                            job: Any = job,
                            rows: Any = rows,
                            kept: Any = kept,
                            programs: int = programs,
                        ) -> None:
                            with torch.cuda.device(pair.device), torch.cuda.stream(stream):
                                copies.launch(kept, words, rows, job, programs)

                        pair.measure(f"triton {tile}K {warps} warps {programs} blocks", piece, size, run, ids)
    finally:
        tables.TILE, tables.WIDTHS, copies.WARPS = before


def native(pair: Pair) -> None:
    """Kernels in CUDA C++."""
    from kvd.backends.direct.cuda.bulk import compiled, nvrtc

    library = nvrtc()
    major, minor = torch.cuda.get_device_capability(pair.device)
    arch = f"sm_{major}{minor}"
    bulk = [(chunk, stages, lag) for chunk, stages, lag in ((16, 8, 2), (16, 12, 4), (32, 6, 2), (8, 16, 4))]
    some = {"CHUNK": 16384, "STAGES": 4, "LAG": 1, "THREADS": 256, "DEEP": 4}
    ways: list[tuple[str, dict[str, int], tuple[int, ...]]] = [
        ("bulk", some | {"CHUNK": chunk << 10, "STAGES": stages, "LAG": lag}, (8, 16, 24, 32, 64, 132))
        for chunk, stages, lag in bulk
    ]
    ways += [
        ("regs", some | {"THREADS": threads, "DEEP": deep}, (32, 64, 132))
        for threads, deep in ((512, 4), (512, 8), (256, 8), (1024, 4))
    ]
    for kind, defines, numbers in ways:
        shown = (
            f"{defines['CHUNK'] >> 10}K x{defines['STAGES']} -{defines['LAG']}"
            if kind == "bulk"
            else f"{defines['THREADS']}x{defines['DEEP']}"
        )
        try:
            module, function = _ptr(), _ptr()
            ok(
                pair.cuda.cuModuleLoadData(ctypes.byref(module), compiled(library, arch, SOURCE, defines)),
                "cuModuleLoadData",
            )
            ok(
                pair.cuda.cuModuleGetFunction(ctypes.byref(function), module, kind.encode()),
                "cuModuleGetFunction",
            )
            shared = defines["CHUNK"] * defines["STAGES"] if kind == "bulk" else 0
            if shared:
                ok(pair.cuda.cuFuncSetAttribute(function, 8, shared), "cuFuncSetAttribute")
        except Exception as error:  # noqa: BLE001 - the other ways shall run
            print(f"{kind} {shown} FAILED {error}", flush=True)
            continue
        threads = 32 if kind == "bulk" else defines["THREADS"]
        for piece in PIECES:
            for size in SIZES:
                ids = pair.chosen(piece, size)
                lists = [torch.from_numpy(one).to(pair.device) for one in ids]
                for programs in numbers:

                    def run(
                        programs: int = programs,
                        lists: Any = lists,
                        piece: int = piece,
                        function: Any = function,
                        threads: int = threads,
                        shared: int = shared,
                    ) -> None:
                        values = (
                            *(_u64(one.data_ptr()) for one in (pair.here, pair.there, *lists)),
                            _int(len(lists[0])),
                            _int(piece),
                        )
                        pointers = (_ptr * len(values))(*(ctypes.addressof(value) for value in values))
                        stream = pair.streams[0].cuda_stream
                        ok(
                            pair.cuda.cuLaunchKernel(
                                function, programs, 1, 1, threads, 1, 1, shared, stream, pointers, None
                            ),
                            "cuLaunchKernel",
                        )

                    pair.measure(f"{kind} {shown} {programs} blocks", piece, size, run, ids)


def beside(pair: Pair) -> None:
    """What products of matrices lose to the best of each kind, in ms for each GiB that is copied."""
    square = torch.randn(8192, 8192, device=pair.device, dtype=torch.bfloat16)
    tall = torch.randn(32, 8192, device=pair.device, dtype=torch.bfloat16)
    weights = torch.randn(8, 8192, 8192, device=pair.device, dtype=torch.bfloat16)
    works: dict[str, Callable[[], object]] = {
        "8192 x 8192": lambda: [torch.mm(square, square) for _ in range(12)],
        "32 x 8192": lambda: [tall @ w for _ in range(40) for w in weights],
    }

    def elapsed(work: Callable[[], object]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    for name, work in works.items():
        work()
        torch.cuda.synchronize(pair.device)
        alone = min(elapsed(work) for _ in range(3))
        for kind, (device, run) in pair.best.items():
            count = int(alone * 2 / (device * 1e3)) + 3
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            ends[0].record(pair.streams[0])
            for _ in range(count):
                run()
            ends[1].record(pair.streams[0])
            slowed = elapsed(work)
            lasted = not ends[1].query()
            torch.cuda.synchronize(pair.device)
            copied = ends[0].elapsed_time(ends[1]) / count
            lost = (slowed - alone) / slowed * copied
            print(
                f"beside {name}: {kind:18} {slowed / alone:.3f} x, {lost:.3f} ms a GiB"
                + ("" if lasted else " (the copies ended first)"),
                flush=True,
            )
