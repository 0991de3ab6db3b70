"""What a load is held against: plain copies by the driver, timed by the clock of the one who asks for them."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch


def from_peer(lane: Any, words: Any, skip: int, size: int, times: int) -> list[dict[str, float]]:
    """Copy ``size`` bytes of the peer, from ``skip`` on, to the same place here: microseconds of each time.

    ``whole`` is from the call until the device has done it, ``device`` what the device took. On CPUs nothing is mapped,
    and it is a copy within this process.
    """
    if words.device.type == "cpu":
        return _on_host(words, size, times)
    peer = next(iter(lane._peers.values()))  # noqa: SLF001 - whose mapping is nobody else's affair
    memory = peer.source.memory
    there = int(memory.seen_at(memory._first[:1])[0]) + skip  # noqa: SLF001
    here = words.data_ptr() + skip
    cuda = ctypes.CDLL("libcuda.so.1")
    stream = torch.cuda.Stream(words.device)
    found = []
    for _ in range(times + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        began = time.perf_counter()
        failed = cuda.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(here),
            ctypes.c_uint64(there),
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream.cuda_stream),
        )
        last.record(stream)
        stream.synchronize()
        whole = time.perf_counter() - began
        if failed:
            raise RuntimeError(f"cuMemcpyDtoDAsync gives {failed}")
        found.append({"whole": whole * 1e6, "device": first.elapsed_time(last) * 1e3})
    return found[1:]


def through_host(words: Any, size: int, times: int) -> list[dict[str, float]]:
    """Copy ``size`` bytes to pinned memory, and back: microseconds of each way, for each time."""
    part = words[: size // 8]
    host = torch.empty(size // 8, dtype=torch.int64, pin_memory=words.device.type == "cuda")
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        host.copy_(part, non_blocking=True)
        _settle(words)
        out = time.perf_counter()
        part.copy_(host, non_blocking=True)
        _settle(words)
        found.append({"out": (out - began) * 1e6, "back": (time.perf_counter() - out) * 1e6})
    return found[1:]


def _on_host(words: Any, size: int, times: int) -> list[dict[str, float]]:
    half = words.numel() // 2
    count = min(size // 8, half)
    memory = words.numpy()
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        np.copyto(memory[:count], memory[half : half + count])
        passed = (time.perf_counter() - began) * 1e6 * (size / (count * 8))
        found.append({"whole": passed, "device": passed})
    return found[1:]


def _settle(words: Any) -> None:
    if words.device.type == "cuda":
        torch.cuda.synchronize(words.device)
