"""Direct reads between GPUs, without vLLM: every byte checked, and how fast, at what cost, and what ends them.

    PYTHONPATH=daemon:. python3 benchmarks/gpu_direct.py --json direct.json

Owner and reader are two processes, on two GPUs where there are two, else on one. Needs torch, Triton, numpy and
msgspec; takes under 100 s. A part that fails stands in the result as an error, and the others still run.
"""
# ruff: noqa: INP001, T201, S101 - a script that prints

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvd.backends.contract import State, Transfer
from kvd.backends.direct import DirectHome, Settings
from kvd.backends.direct_cuda_copies import engine
from kvd.backends.direct_cuda_lane import CudaLane
from kvd.backends.errors import BackendError
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors, coalesce
from kvd.topology.grid import Grid, Picks

MIB = 1 << 20
LARGE, SMALL = 1024 * MIB, 64 * MIB
"""Bytes of the two tensors that a worker registers."""
UNTOUCHED = 0xEE
SECONDS = 95
CTAS = (8, 16, 32, 48, 64, 96, 128, 264)


# --- the owner ---


def pattern(offsets: Any, tensor: int) -> Any:
    """The byte at each offset of an owner's tensor: no two places within 16 MiB look alike for long."""
    return ((offsets * 37 + (offsets >> 8) * 11 + (offsets >> 16) * 101 + tensor * 59) & 0xFF).to(torch.uint8)


def tensors(device: str) -> list[Any]:
    """A worker's memory, not filled."""
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in (LARGE, SMALL)]


def fill(memory: list[Any]) -> None:
    """Write the pattern, in parts, as offsets take eight times the memory."""
    for number, tensor in enumerate(memory):
        for start in range(0, len(tensor), 64 * MIB):
            end = min(len(tensor), start + 64 * MIB)
            tensor[start:end] = pattern(torch.arange(start, end, device=tensor.device), number)
    torch.cuda.synchronize(memory[0].device)


def regions(memory: list[Any]) -> list[Region]:
    """As a worker registers them."""
    return [Region(t.data_ptr(), len(t), str(t.device)) for t in memory]


def own(device: str) -> None:
    """The owner's process: one JSON line with metadata and addresses, then obeys lines on stdin."""
    torch.cuda.set_device(device)
    memory = tensors(device)
    fill(memory)
    home = DirectHome("owner", Settings())
    home.register(regions(memory))
    addresses = [t.data_ptr() for t in memory]
    print(json.dumps({"metadata": home.metadata().hex(), "addresses": addresses}), flush=True)
    for line in sys.stdin:
        if line == "close\n":
            home.close()
        print("done", flush=True)


@dataclass
class Owner:
    """A started owner."""

    process: subprocess.Popen[str]
    metadata: bytes
    addresses: list[int]

    def order(self, word: str) -> None:
        """Tell it, and wait until it did."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@contextmanager
def owner(device: str, **environ: str) -> Iterator[Owner]:
    """An owner on a device, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--owner", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the owner on {device} ended before it had registered")
        hello = json.loads(line)
        yield Owner(process, bytes.fromhex(hello["metadata"]), hello["addresses"])
    finally:
        process.kill()
        process.wait()


# --- the reader ---


@dataclass
class Reader:
    """This process: memory on a device, homes over it, and what was seen."""

    device: str
    memory: list[Any]
    seen: dict[str, Any]

    def home(self, ctas: int = Settings().ctas) -> DirectHome:
        """A home over the memory, for copies of ``ctas`` thread blocks."""
        home = DirectHome("reader", Settings(ctas=ctas))
        home.register(regions(self.memory))
        return home

    def lane(self, peer: Owner, ctas: int = Settings().ctas) -> CudaLane:
        """A lane to an owner, of a home of its own."""
        lane = self.home(ctas).lane("owner")
        assert isinstance(lane, CudaLane)
        lane.add("p", peer.metadata)
        return lane

    def clear(self) -> None:
        """Make all bytes those that nothing was copied to."""
        for tensor in self.memory:
            tensor.fill_(UNTOUCHED)
        torch.cuda.synchronize(self.device)

    def wrong(self, peer: Owner, rows: Descriptors) -> int:
        """How many bytes, of all, are not what they should be after ``rows`` were copied onto cleared memory."""
        count = 0
        for number, tensor in enumerate(self.memory):
            base, there = tensor.data_ptr(), peer.addresses[number]
            inside = (rows.local >= base) & (rows.local < base + len(tensor))
            expected = torch.full_like(tensor, UNTOUCHED)
            for length in np.unique(rows.length[inside]):
                chosen = inside & (rows.length == length)
                at = torch.from_numpy(rows.local[chosen] - base).to(self.device)
                source = torch.from_numpy(rows.remote[chosen] - there).to(self.device)
                step, within = max(1, 64 * MIB // int(length)), torch.arange(int(length), device=self.device)
                for first in range(0, len(at), step):
                    part = slice(first, first + step)
                    places = (at[part, None] + within).ravel()
                    expected[places] = pattern((source[part, None] + within).ravel(), number)
            count += int((expected != tensor).sum().item())
        return count


def wait(lane: CudaLane, transfer: Transfer) -> Transfer:
    """Until it ended."""
    while lane.poll(transfer) is State.PENDING:
        pass
    return transfer


def finished(lane: CudaLane, transfer: Transfer) -> Transfer:
    """Until it ended well."""
    if wait(lane, transfer).state is not State.DONE:
        raise RuntimeError(transfer.reason)
    return transfer


def begun(lane: CudaLane, copies: Picks | Descriptors) -> Transfer:
    """Start copying, by number or by address."""
    if isinstance(copies, Picks):
        return lane.submit_picks("p", copies)
    return lane.submit("p", copies)


def timed(lane: CudaLane, copies: Picks | Descriptors, times: int = 8) -> dict[str, Any]:
    """Medians of some copies after one that is not counted: on the device, in the call, in all; GB/s of the first."""
    device, call, whole = [], [], []
    for number in range(times + 1):
        began = time.perf_counter()
        transfer = begun(lane, copies)
        posted = time.perf_counter()
        finished(lane, transfer)
        if number:
            whole.append(time.perf_counter() - began)
            call.append(posted - began)
            device.append(transfer.detail["device_seconds"])
    middle = statistics.median(device)
    return {
        "gb_s": round(transfer.bytes / middle / 1e9, 1),
        "device_ms": round(middle * 1e3, 4),
        "call_ms": round(statistics.median(call) * 1e3, 4),
        "whole_ms": round(statistics.median(whole) * 1e3, 4),
        "mib": round(transfer.bytes / MIB, 2),
    }


def pieces(reader: Reader, peer: Owner, length: int, count: int, seed: int = 0, stride: int = 0) -> Picks:
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


def picked(grid: Grid, blocks: int, seed: int = 0) -> Picks:
    """All rows of a grid in ``blocks`` random blocks on both sides."""
    dice = np.random.default_rng(seed)
    mine = dice.permutation(grid.local_blocks)[:blocks].astype(np.int32)
    theirs = dice.permutation(grid.remote_blocks)[:blocks].astype(np.int32)
    row = np.arange(len(grid), dtype=np.int32)[:, None]
    return Picks(
        grid,
        (row * np.int32(grid.local_blocks) + mine).ravel(),
        (row * np.int32(grid.remote_blocks) + theirs).ravel(),
        int(grid.length.sum()) * blocks,
    )


def halved(reader: Reader, peer: Owner) -> Picks:
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


def groups(reader: Reader, peer: Owner) -> Picks:
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


def bytewise(reader: Reader, peer: Owner) -> Picks:
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


# --- the parts ---


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
    for name, picks in cases.items():
        rows = picks.descriptors()
        reader.clear()
        finished(lane, lane.submit_picks("p", picks))
        by_number = reader.wrong(peer, rows)
        reader.clear()
        finished(lane, lane.submit("p", rows))
        by_address = reader.wrong(peer, rows)
        result[name] = {
            "pieces": len(picks),
            "wrong_bytes": by_number,
            "wrong_bytes_by_address": by_address,
            **timed(lane, picks),
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
            picks = pieces(reader, peer, length, count)
            result[name][ctas] = timed(lane, picks, 5)["gb_s"]
        lane.close()
    return result


def plain_copy(reader: Reader, peer: Owner) -> dict[str, Any]:
    """The driver's copy of half a GiB out of the mapped memory, as it is the ceiling."""
    lane = reader.lane(peer)
    source = lane._peers["p"].source.spans.where(np.array(peer.addresses[:1], np.int64))  # noqa: SLF001
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
            picks = pieces(reader, peer, 64 << 10, 8192)
            one = finished(lane, lane.submit_picks("p", picks)).detail["device_seconds"] * 1e3
            flights = [lane.submit_picks("p", picks) for _ in range(int(alone * 2.5 / one) + 2)]
            slowed = _elapsed(work, warm=False)
            lasted = lane.poll(flights[-1]) is State.PENDING
            for flight in flights:
                finished(lane, flight)
            copied = statistics.median(f.detail["device_seconds"] for f in flights[1:]) * 1e3
            result[name][ctas] = {
                "x": round(slowed / alone, 3),
                "lasted": lasted,
                "copy_ms": round(copied, 3),
                "lost_ms_per_gib": round((slowed - alone) / slowed * copied * 1024 * MIB / picks.nbytes, 4),
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
    home = reader.home()
    result["register_ms"] = round((time.perf_counter() - began) * 1e3, 2)
    opened, closed = [], []
    for _ in range(3):
        began = time.perf_counter()
        lane = home.lane("owner")
        lane.add("p", peer.metadata)
        opened.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        lane.close()
        closed.append((time.perf_counter() - began) * 1e3)
    result["open_ms"], result["close_ms"] = [round(v, 2) for v in opened], [round(v, 2) for v in closed]
    lane = home.lane("owner")
    assert isinstance(lane, CudaLane)
    lane.add("p", peer.metadata)
    for name, length, count in (
        ("8 of 16 B", 16, 8),
        ("10000 of 4 KiB", 4096, 10000),
        ("512 of 64 KiB", 64 << 10, 512),
    ):
        picks = pieces(reader, peer, length, count, stride=max(length, 4096))
        result[name] = timed(lane, picks, 20)
        rows = picks.descriptors()
        result[f"{name}, by address"] = timed(lane, rows, 20)
    home.close()
    return result


def ends(reader: Reader, device: str) -> dict[str, Any]:
    """The owner is stopped, closes its home, or is killed with copies in flight."""
    result: dict[str, Any] = {}
    with owner(device) as peer:
        lane = reader.lane(peer)
        picks = pieces(reader, peer, 64 << 10, 8192)
        rows = picks.descriptors()
        os.kill(peer.process.pid, signal.SIGSTOP)
        reader.clear()
        finished(lane, lane.submit_picks("p", picks))
        result["stopped_wrong_bytes"] = reader.wrong(peer, rows)
        os.kill(peer.process.pid, signal.SIGCONT)
        reader.clear()
        flights = [lane.submit_picks("p", picks) for _ in range(100)]
        peer.process.kill()
        pending = lane.poll(flights[-1]) is State.PENDING
        result["killed_in_flight"] = pending
        peer.process.wait()
        result["states_after_kill"] = sorted({wait(lane, f).state.value for f in flights})
        result["killed_wrong_bytes"] = reader.wrong(peer, rows)
        try:
            lane.submit_picks("p", picks)
            result["submit_after_death"] = "accepted"
        except BackendError as error:
            result["submit_after_death"] = f"{type(error).__name__}: {error}"
        free = torch.cuda.mem_get_info(device)[0]
        lane.close()
        result["mib_free_by_closing"] = (torch.cuda.mem_get_info(device)[0] - free) // MIB
    with owner(device) as peer:
        lane = reader.lane(peer)
        picks = pieces(reader, peer, 64 << 10, 8192)
        flights = [lane.submit_picks("p", picks) for _ in range(20)]
        began = time.perf_counter()
        lane.close()
        result["close_under_20_copies_ms"] = round((time.perf_counter() - began) * 1e3, 2)
        result["states_after_close"] = sorted({f.state.value for f in flights})
        lane = reader.lane(peer)
        transfer = lane.submit_picks("p", picks)
        peer.order("close")
        result["home_closed"] = f"{wait(lane, transfer).state.value}: {transfer.reason}"
        lane.close()
    return result


def one_read(reader: Reader, peer: Owner) -> dict[str, Any]:
    """A lane, one checked copy, and its speed."""
    lane = reader.lane(peer)
    picks = pieces(reader, peer, 64 << 10, 8192)
    reader.clear()
    finished(lane, lane.submit_picks("p", picks))
    wrong = reader.wrong(peer, picks.descriptors())
    result = {"wrong_bytes": wrong, **timed(lane, picks)}
    lane.close()
    return result


def from_another(reader: Reader, device: str, **environ: str) -> dict[str, Any]:
    """`one_read` of an owner with other settings."""
    with owner(device, **environ) as peer:
        return one_read(reader, peer)


def from_itself(reader: Reader) -> dict[str, Any]:
    """A home and a lane in one process."""
    memory = tensors(reader.device)
    fill(memory)
    home = DirectHome("itself", Settings())
    home.register(regions(memory))
    peer = Owner(subprocess.Popen(["true"], text=True), home.metadata(), [t.data_ptr() for t in memory])
    peer.process.wait()
    try:
        return one_read(reader, peer)
    finally:
        home.close()


def part(reader: Reader, name: str, work: Callable[[], Any]) -> None:
    """Run one part, note what it gave or why it did not, and print it."""
    began = time.perf_counter()
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - the others shall run
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    reader.seen[name] = found
    print(f"# {name} ({time.perf_counter() - began:.1f} s)")
    print(json.dumps(found, indent=1), flush=True)


def main() -> None:
    """Run all parts, most wanted first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--owner", metavar="DEVICE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.owner:
        own(given.owner)
        return
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(SECONDS)
    several = torch.cuda.device_count() > 1
    theirs, mine = "cuda:0", "cuda:1" if several else "cuda:0"
    torch.cuda.set_device(mine)
    seen = {"gpu": torch.cuda.get_device_name(), "gpus": 2 if several else 1, "torch": torch.__version__}
    reader = Reader(mine, tensors(mine), seen)
    try:
        with owner(theirs) as peer:
            part(reader, "costs", lambda: costs(reader, peer))
            part(reader, "bytes", lambda: check_bytes(reader, peer))
            part(reader, "plain copy", lambda: plain_copy(reader, peer))
            part(reader, "by thread blocks", lambda: sweep(reader, peer))
            part(reader, "compute beside it", lambda: beside(reader, peer))
            part(reader, "beside python", lambda: busy_python(reader, peer))
        part(reader, "ends", lambda: ends(reader, theirs))
        part(reader, "same process", lambda: from_itself(reader))
        if several:
            part(reader, "two processes on one gpu", lambda: from_another(reader, mine))
        expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        part(reader, "expandable segments", lambda: from_another(reader, theirs, **expandable))
        if several:
            only = {"CUDA_VISIBLE_DEVICES": "1"}
            part(reader, "owner that sees one gpu", lambda: from_another(reader, "cuda:0", **only))
    finally:
        if given.json:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(seen, indent=1))


def _out_of_time(*_: object) -> None:
    raise SystemExit(f"out of time after {SECONDS} s")


if __name__ == "__main__":
    main()
