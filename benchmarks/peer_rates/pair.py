"""Two memories on two devices, and how long a way of copying between them takes."""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

MIB = 1 << 20
POOL = 2112 * MIB
SIZES = (256 * MIB, 1024 * MIB)
PIECES = (MIB, 64 << 10)
TIMES = 7
_U64, _SIZE, _INT, _UINT, _PTR = (
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
)


def driver() -> Any:
    """The CUDA driver, its calls with the types of their arguments."""
    cuda = ctypes.CDLL("libcuda.so.1")
    for name, takes in {
        "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _PTR),
        "cuCtxSetCurrent": (_PTR,),
        "cuCtxEnablePeerAccess": (_PTR, _UINT),
        "cuDevicePrimaryCtxRetain": (_PTR, _INT),
        "cuModuleLoadData": (_PTR, ctypes.c_char_p),
        "cuModuleGetFunction": (_PTR, _PTR, ctypes.c_char_p),
        "cuFuncSetAttribute": (_PTR, _INT, _INT),
        "cuLaunchKernel": (_PTR, *(_UINT,) * 7, _PTR, _PTR, _PTR),
    }.items():
        getattr(cuda, name).argtypes = takes
    return cuda


def ok(number: int, what: str) -> None:
    """Raise where a call failed."""
    if number:
        raise RuntimeError(f"{what} gives {number}")


@dataclass
class Pair:
    """Two memories, the pieces that are copied between them, and where results go."""

    cuda: Any
    there: Any
    here: Any
    device: Any
    streams: list[Any]
    out: Any
    until: float
    plain: dict[int, float] = field(default_factory=dict)
    best: dict[str, tuple[float, Callable[[], object]]] = field(default_factory=dict)

    def chosen(self, piece: int, size: int) -> tuple[Any, Any]:
        """Block ids on both sides, in random order."""
        blocks, count = POOL // piece, size // piece
        mine, theirs = (
            np.random.default_rng(seed).permutation(blocks)[:count].astype(np.int32) for seed in (1, 2)
        )
        return mine, theirs

    def wrong(self, piece: int, mine: Any, theirs: Any) -> int:
        """Words of the chosen pieces that are not those of the other side."""
        here, there = (words.view(-1, piece // 8) for words in (self.here, self.there))
        count = 0
        for at in range(0, len(mine), max(1, (64 * MIB) // piece)):
            part = slice(at, at + max(1, (64 * MIB) // piece))
            got = here[torch.from_numpy(mine[part].astype(np.int64)).to(here.device)]
            told = there[torch.from_numpy(theirs[part].astype(np.int64)).to(there.device)].to(here.device)
            count += int((got != told).sum())
        return count

    def measure(
        self, name: str, piece: int, size: int, run: Callable[[], object], ids: tuple[Any, Any] | None
    ) -> None:
        """Time a way that works on the first stream from begin to end, and print it."""
        if time.monotonic() > self.until:
            return
        line: dict[str, Any] = {"way": name, "piece_kib": piece >> 10, "mib": size >> 20}
        try:
            self.here.fill_(-1)
            torch.cuda.synchronize(self.device)
            run()
            torch.cuda.synchronize(self.device)
            wrong = self.wrong(piece, *ids) if ids is not None and size == SIZES[0] else 0
            found = [self._once(run) for _ in range(TIMES)]
            call, device, whole = (median(column) for column in zip(*found, strict=True))
            rates = [size / seconds / 1e9 for seconds in (device, whole)]
            line |= {
                "call_ms": call * 1e3,
                "device_ms": device * 1e3,
                "whole_ms": whole * 1e3,
                "wrong": wrong,
            }
            line |= {"gb_s": rates[0], "whole_gb_s": rates[1]}
            if name == "plain":
                self.plain[size] = device
            of = self.plain.get(size, 0.0) / device
            print(
                f"{name:34} {piece >> 10:5} KiB {size >> 20:5} MiB  call {call * 1e3:6.3f}  device {device * 1e3:6.3f}"
                f"  whole {whole * 1e3:6.3f} ms  {rates[0]:6.1f} GB/s  {of:.3f} of plain"
                + (f"  {wrong} WRONG" if wrong else ""),
                flush=True,
            )
            if size == SIZES[1] and not wrong:
                kind = f"{name.partition(' ')[0]} {piece >> 10} KiB"
                if kind not in self.best or device < self.best[kind][0]:
                    self.best[kind] = (device, run)
        except Exception as error:  # noqa: BLE001 - the other ways shall run
            line["error"] = str(error)[-400:]
            print(f"{name:34} {piece >> 10:5} KiB {size >> 20:5} MiB  FAILED {line['error']}", flush=True)
        if self.out:
            self.out.write(json.dumps({key: _short(value) for key, value in line.items()}) + "\n")
            self.out.flush()

    def _once(self, run: Callable[[], object]) -> tuple[float, float, float]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        first.record(self.streams[0])
        run()
        last.record(self.streams[0])
        called = time.perf_counter()
        last.synchronize()
        whole = time.perf_counter() - began
        return called - began, first.elapsed_time(last) / 1e3, whole


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def forked(pair: Pair, count: int, post: Callable[[int, int], None]) -> None:
    """Have each of so many streams work, begun and ended by the first one."""
    streams = pair.streams[:count]
    if count > 1:
        begun = torch.cuda.Event()
        begun.record(streams[0])
        for other in streams[1:]:
            other.wait_event(begun)
    for number, stream in enumerate(streams):
        post(number, stream.cuda_stream)
    for other in streams[1:]:
        ended = torch.cuda.Event()
        ended.record(other)
        streams[0].wait_event(ended)
