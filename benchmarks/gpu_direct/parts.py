"""Copies out of an owner that lives: their bytes, their speed, what they cost and what they slow down."""
# ruff: noqa: S101 - a script

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_direct.owner import MIB, Owner
from benchmarks.gpu_direct.reader import Reader, finished, timed
from benchmarks.gpu_direct.shapes import bytewise, groups, halved, pieces
from kvd.backends.contract import State
from kvd.backends.direct.cuda.copies import engine
from kvd.backends.direct.cuda.lane import CudaLane
from kvd.topology.descriptors import coalesce

CTAS = (8, 16, 32, 48, 64, 96, 128, 264)


def check_bytes(reader: Reader, peer: Owner) -> dict[str, Any]:
    """Each shape of copy on cleared memory, by number and by address; zero wrong bytes of all."""
    lane = reader.lane(peer)
    cases = {
        "64 KiB": pieces(reader, peer, 64 << 10, 8192),
        "16 KiB": pieces(reader, peer, 16 << 10, 32768),
        "4 KiB": pieces(reader, peer, 4 << 10, 65536),
        "300 B": pieces(reader, peer, 300, 65536, stride=304),
        "unequal tp": halved(reader, peer),
        "several groups": groups(reader, peer),
        "bytewise": bytewise(reader, peer),
    }
    result: dict[str, Any] = {}
    for name, selection in cases.items():
        rows = selection.descriptors()
        reader.clear()
        finished(lane, lane.submit_selection("p", selection))
        by_number = reader.wrong(peer, rows)
        reader.clear()
        finished(lane, lane.submit("p", rows))
        by_address = reader.wrong(peer, rows)
        result[name] = {
            "pieces": len(selection),
            "wrong_bytes": by_number,
            "wrong_bytes_by_address": by_address,
            **timed(lane, selection),
        }
    lane.close()
    return result


def sweep(reader: Reader, peer: Owner) -> dict[str, Any]:
    """GB/s by number of thread blocks."""
    shapes = {"64 KiB": (64 << 10, 8192), "16 KiB": (16 << 10, 32768), "4 KiB": (4 << 10, 65536)}
    result: dict[str, Any] = {name: {} for name in shapes}
    for ctas in CTAS:
        lane = reader.lane(peer, ctas)
        for name, (length, count) in shapes.items():
            selection = pieces(reader, peer, length, count)
            result[name][ctas] = timed(lane, selection, 5)["gb_s"]
        lane.close()
    return result


def plain_copy(reader: Reader, peer: Owner) -> dict[str, Any]:
    """The driver's copy of half a GiB out of the mapped memory, as it is the ceiling."""
    lane = reader.lane(peer)
    source = lane._peers["p"].source.memory.seen_at(np.array(peer.addresses[:1], np.int64))  # noqa: SLF001
    size, cuda = 512 * MIB, ctypes.CDLL("libcuda.so.1")
    times = []
    for _ in range(6):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        failed = cuda.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(reader.memory[0].data_ptr()),
            ctypes.c_uint64(int(source[0])),
            ctypes.c_size_t(size),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        last.record()
        torch.cuda.synchronize()
        if failed:
            raise RuntimeError(f"cuMemcpyDtoDAsync gives {failed}")
        times.append(first.elapsed_time(last) / 1e3)
    lane.close()
    return {"gb_s": round(size / statistics.median(times[1:]) / 1e9, 1)}


def beside(reader: Reader, peer: Owner) -> dict[str, Any]:
    """What compute on the reader loses to copies that run without pause: large and memory-bound products.

    ``x`` is how much slower it gets, ``lost_ms_per_gib`` the time that it loses for each GiB that is copied: few thread
    blocks slow it less and for longer.
    """
    square = torch.randn(8192, 8192, device=reader.device, dtype=torch.bfloat16)
    tall = torch.randn(32, 8192, device=reader.device, dtype=torch.bfloat16)
    weights = torch.randn(8, 8192, 8192, device=reader.device, dtype=torch.bfloat16)
    loads: dict[str, Callable[[], object]] = {
        "matmul 8192": lambda: [torch.mm(square, square) for _ in range(20)],
        "decode-like 32x8192x8192": lambda: [tall @ w for _ in range(60) for w in weights],
    }
    result: dict[str, Any] = {name: {} for name in loads}
    for name, work in loads.items():
        alone = _elapsed(work)
        result[name]["alone_ms"] = round(alone, 3)
        for ctas in CTAS:
            lane = reader.lane(peer, ctas)
            selection = pieces(reader, peer, 64 << 10, 8192)
            one = finished(lane, lane.submit_selection("p", selection)).detail["device_seconds"] * 1e3
            flights = [lane.submit_selection("p", selection) for _ in range(int(alone * 2.5 / one) + 2)]
            slowed = _elapsed(work, warm=False)
            lasted = lane.poll(flights[-1]) is State.PENDING
            for flight in flights:
                finished(lane, flight)
            copied = statistics.median(f.detail["device_seconds"] for f in flights[1:]) * 1e3
            result[name][ctas] = {
                "x": round(slowed / alone, 3),
                "lasted": lasted,
                "copy_ms": round(copied, 3),
                "lost_ms_per_gib": round(
                    (slowed - alone) / slowed * copied * 1024 * MIB / selection.nbytes, 4
                ),
            }
            lane.close()
        result[name]["least_lost_at"] = min(
            (c for c in CTAS if result[name][c]["lasted"]),
            key=lambda c: result[name][c]["lost_ms_per_gib"],
            default=None,
        )
    return result


def busy_python(reader: Reader, peer: Owner) -> dict[str, Any]:
    """The same launch beside a thread that runs torch without pause, as an engine does; by the driver and by Triton."""
    on = threading.Event()
    on.set()
    small = torch.zeros(64, device=reader.device)
    beside = torch.cuda.Stream(reader.device)

    def launches() -> None:
        with torch.cuda.stream(beside):
            while on.is_set():
                for _ in range(50):
                    small.add_(1)
                beside.synchronize()

    lane = reader.lane(peer)
    whole = pieces(reader, peer, 64 << 10, 4096)
    rows = coalesce(whole.descriptors())
    shared = engine(torch.device(reader.device).index)
    kernels = dict(shared.kernels)
    result: dict[str, Any] = {"launched_by_driver": bool(kernels)}
    thread = threading.Thread(target=launches)
    try:
        for name in ("quiet", "busy"):
            if name == "busy":
                thread.start()
            for way in ("driver", "triton"):
                shared.kernels = kernels if way == "driver" else {}
                found = timed(lane, whole, 30)
                found["by_address_call_ms"] = timed(lane, rows, 30)["call_ms"]
                result[f"{name}, {way}"] = found
    finally:
        shared.kernels = kernels
        on.clear()
        if thread.is_alive():
            thread.join()
        lane.close()
    return result


def _elapsed(work: Callable[[], object], *, warm: bool = True) -> float:
    if warm:
        work()
        torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def costs(reader: Reader, peer: Owner) -> dict[str, Any]:
    """What opening, closing, launching and sending numbers cost, in ms."""
    result: dict[str, Any] = {}
    began = time.perf_counter()
    backend = reader.backend()
    result["register_ms"] = round((time.perf_counter() - began) * 1e3, 2)
    opened, closed = [], []
    for _ in range(3):
        began = time.perf_counter()
        lane = backend.lane("owner")
        lane.add("p", peer.metadata)
        opened.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        lane.close()
        closed.append((time.perf_counter() - began) * 1e3)
    result["open_ms"], result["close_ms"] = [round(v, 2) for v in opened], [round(v, 2) for v in closed]
    lane = backend.lane("owner")
    assert isinstance(lane, CudaLane)
    lane.add("p", peer.metadata)
    for name, length, count in (
        ("8 of 16 B", 16, 8),
        ("10000 of 4 KiB", 4096, 10000),
        ("512 of 64 KiB", 64 << 10, 512),
    ):
        selection = pieces(reader, peer, length, count, stride=max(length, 4096))
        result[name] = timed(lane, selection, 20)
        rows = selection.descriptors()
        result[f"{name}, by address"] = timed(lane, rows, 20)
    backend.close()
    return result
