"""How fast one GPU reads scattered pieces of another one's memory: the driver's copies, and kernels of several kinds.

    PYTHONPATH=daemon:. python3 -m benchmarks.peer_rates [--out rates.jsonl] [--seconds 60]

One process with two devices, on one device where there is only one. Each way copies 256 MiB and 1 GiB in pieces of
1 MiB and of 64 KiB, in random order, and is compared word by word once. A way that fails is a line that says so. For
each there is what the calls took (``call``), what the device took, and both together as whoever waits sees it
(``whole``).

- ``plain``: one copy by the driver, which the others are held against.
- ``each``: one call of the driver for each piece, on some streams in turn.
- ``batch``: `cuMemcpyBatchAsync`, on some streams in turn; ``chunks`` hands the first pieces over before the others.
- ``triton``: the kernel of the direct backend, with other tiles, warps and thread blocks.
- ``regs``: CUDA C++, 16 bytes at a time through registers; ``bulk``: bulk copies through shared memory, one thread of a
  block. Compiled by NVRTC, which torch brings along.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.peer_rates.driver_copies import batch, each, plain
from benchmarks.peer_rates.kernels import beside, native, triton
from benchmarks.peer_rates.pair import MIB, POOL, Pair, driver, ok


def ways(given: str) -> Iterator[Callable[[Pair], None]]:
    """Those that are wanted, in this order."""
    found = {one.__name__: one for one in (plain, native, triton, each, beside, batch)}
    return (found[name] for name in given.split(","))


def main() -> None:
    """Run all ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="nothing is measured after so many")
    parser.add_argument("--only", default="plain,native,triton,each,beside,batch")
    given = parser.parse_args()
    several = torch.cuda.device_count() > 1
    theirs, mine = torch.device("cuda:0"), torch.device("cuda:1" if several else "cuda:0")
    there = torch.empty(POOL // 8, dtype=torch.int64, device=theirs)
    for at in range(0, len(there), 32 * MIB):
        part = torch.arange(at, min(len(there), at + 32 * MIB), dtype=torch.int64, device=theirs)
        there[at : at + len(part)] = part * 0x5851F42D4C957F2D + 1
    torch.cuda.synchronize(theirs)
    torch.cuda.set_device(mine)
    here = torch.empty(POOL // 8, dtype=torch.int64, device=mine)
    cuda = driver()
    contexts = []
    for device in (theirs, mine):
        made = ctypes.c_void_p()
        ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), device.index), "cuDevicePrimaryCtxRetain")
        contexts.append(made)
    ok(cuda.cuCtxSetCurrent(contexts[1]), "cuCtxSetCurrent")
    if several:
        failed = cuda.cuCtxEnablePeerAccess(contexts[0], 0)
        ok(0 if failed == 704 else failed, "cuCtxEnablePeerAccess")  # 704: it is already
    streams = [torch.cuda.Stream(mine) for _ in range(4)]
    print(f"# {torch.cuda.get_device_name(mine)}, {1 + several} GPU(s), pid {os.getpid()}", flush=True)
    out = given.out.open("w") if given.out else None
    pair = Pair(cuda, there, here, mine, streams, out, time.monotonic() + given.seconds)
    for way in ways(given.only):
        began = time.monotonic()
        try:
            way(pair)
        except Exception as error:  # noqa: BLE001 - the others shall run
            print(f"# {way.__name__} FAILED {error}", flush=True)
        print(f"# {way.__name__} took {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
