"""NIXL and Mooncake on GPU memory, without vLLM: every byte checked, rates, and what lands after a lane is closed.

    python3 benchmarks/gpu_engines.py [--backend nixl --backend mooncake] [--device cuda] [--mib 1024] [--json PATH]

An owner and a reader in two processes, on two GPUs where there are two, else on one; with ``--device cpu`` on none.
Each stage says what it saw; one that fails does not stop the next. Takes under two minutes.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvd.backends.contract import Backend, Lane, State, Transfer
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection
from kvd.vllm.memory.streams import marker

PAGE = 64 << 10
LAYERS = 16
OFFSET = 3 << 20
"""Bytes before the registered region in its allocation, as where torch cuts tensors out of larger ones."""
REPEATS = 4


@dataclass
class Reader:
    """This side: its memory, its home, and the owner's process."""

    backend: str
    memory: torch.Tensor
    home: Backend
    owner: multiprocessing.process.BaseProcess
    pipe: Connection
    metadata: bytes
    remote: int
    seen: dict[str, Any] = field(default_factory=dict)

    @property
    def local(self) -> int:
        """Where the registered memory begins."""
        return int(self.memory.data_ptr())

    def lane(self) -> Lane:
        """A lane to the owner."""
        lane = self.home.lane("owner")
        lane.add("owner", self.metadata)
        return lane

    def wipe(self) -> None:
        """Zero the memory, and wait for that."""
        self.memory.zero_()
        synchronize(self.memory)

    def wrong(self, rows: Descriptors) -> int:
        """How many rows do not hold what the owner has there."""
        words = self.memory.view(torch.int32)
        bad = 0
        for here, there, length in zip(
            *(c.tolist() for c in (rows.local, rows.remote, rows.length)), strict=True
        ):
            first = (there - self.remote) // 4
            wanted = torch.arange(first, first + length // 4, dtype=torch.int32, device=words.device)
            at = (here - self.local) // 4
            bad += not torch.equal(words[at : at + length // 4], wanted)
        return bad


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def memory_on(device: str, size: int) -> torch.Tensor:
    """Bytes that begin in the middle of their allocation."""
    if device != "cpu":
        torch.cuda.set_device(device)
    return torch.zeros(OFFSET + size, dtype=torch.uint8, device=device)[OFFSET:]


def own(backend: str, device: str, size: int, pipe: Connection) -> None:
    """The owner's process: each word of its memory holds its own number."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="owner %(name)s: %(message)s")
    memory = memory_on(device, size)
    memory.view(torch.int32).copy_(torch.arange(size // 4, dtype=torch.int32, device=memory.device))
    synchronize(memory)
    home = open_backend(backend, "owner", {})
    home.register([Region(memory.data_ptr(), size, device)])
    pipe.send((home.metadata(), memory.data_ptr()))
    while (question := pipe.recv()) != "end":
        pipe.send(f"{question}: alive")
    home.close()
    pipe.send("closed")


def finish(lane: Lane, transfer: Transfer, seconds: float = 20.0) -> State:
    """Poll to the end, or for so long."""
    until = time.monotonic() + seconds
    while lane.poll(transfer) is State.PENDING and time.monotonic() < until:
        time.sleep(5e-5)
    return transfer.state


def timed(lane: Lane, submit: Callable[[], Transfer]) -> dict[str, Any]:
    """One transfer: when the post returned, when it was done."""
    began = time.perf_counter()
    transfer = submit()
    posted = time.perf_counter() - began
    state = finish(lane, transfer)
    whole = time.perf_counter() - began
    return {
        "state": state.value,
        "reason": transfer.reason,
        "post_ms": round(posted * 1e3, 3),
        "ms": round(whole * 1e3, 3),
        "gb_s": round(transfer.bytes / whole / 1e9, 2),
        "detail": {name: round(value, 1) for name, value in transfer.detail.items()},
    }


def rows_of(reader: Reader, piece: int, *, shuffled: bool, most: int = 16384) -> Descriptors:
    """The whole memory in pieces, or as much of it as so many are."""
    count = min(len(reader.memory) // piece, most)
    order = np.random.default_rng(1)
    pick = [order.permutation(count) if shuffled else np.arange(count) for _ in range(2)]
    here, there = (np.asarray(p, np.int64) * piece for p in pick)
    return Descriptors(reader.local + here, reader.remote + there, np.full(count, piece, np.int64))


def read_shapes(reader: Reader) -> None:
    """Every byte right, and how fast, with a lane that is made and used in a thread of its own, as the connector's."""
    lane = None
    for name, piece, shuffled in (
        ("64 KiB", PAGE, True),
        ("16 KiB", 16 << 10, True),
        ("1 MiB", 1 << 20, True),
        ("16 MiB", 16 << 20, True),
        ("one piece", len(reader.memory), False),
    ):
        rows = rows_of(reader, piece, shuffled=shuffled)
        if lane is None:
            began = time.perf_counter()
            lane = reader.lane()
            reader.seen["lane_ms"] = round((time.perf_counter() - began) * 1e3, 1)
        reader.wipe()
        runs = [timed(lane, lambda lane=lane, rows=rows: lane.submit("owner", rows)) for _ in range(REPEATS)]
        sample = np.random.default_rng(2).permutation(len(rows))[:256]
        bad = reader.wrong(Descriptors(rows.local[sample], rows.remote[sample], rows.length[sample]))
        reader.seen[name] = {
            "rows": len(rows),
            "wrong": bad,
            "first": runs[0],
            "best": min(runs, key=lambda r: r["ms"]),
        }
    if lane is not None:
        lane.close()


def read_picks(reader: Reader) -> None:
    """The same by numbers of cells, where the backend takes them."""
    if not reader.home.traits.strided_lists:
        reader.seen["picks"] = "not of this backend"
        return
    blocks = len(reader.memory) // (LAYERS * PAGE)
    at = np.arange(LAYERS, dtype=np.int64) * blocks * PAGE
    each = np.full(LAYERS, PAGE, np.int64)
    grid = Grid(reader.local + at, reader.remote + at, each, each, each, blocks, blocks)
    order = np.random.default_rng(3)
    cells = [
        (np.arange(LAYERS)[:, None] * blocks + order.permutation(blocks)[None, :]).ravel().astype(np.int32)
        for _ in range(2)
    ]
    selection = Selection(grid, cells[0], cells[1], nbytes=len(cells[0]) * PAGE)
    lane = reader.lane()
    reader.wipe()
    runs = [timed(lane, lambda: lane.submit_selection("owner", selection)) for _ in range(REPEATS)]  # type: ignore[attr-defined]
    rows = selection.descriptors()
    sample = order.permutation(len(rows))[:256]
    bad = reader.wrong(Descriptors(rows.local[sample], rows.remote[sample], rows.length[sample]))
    reader.seen["picks"] = {
        "cells": len(rows),
        "wrong": bad,
        "first": runs[0],
        "best": min(runs, key=lambda r: r["ms"]),
    }
    lane.close()


def lanes(reader: Reader) -> None:
    """The same pages by several lanes, each with a thread: whether posting is faster so, or waits for one lock."""
    rows = rows_of(reader, PAGE, shuffled=True)
    for count in (1, 2, 4):
        shares = [
            Descriptors(*(c[n::count].copy() for c in (rows.local, rows.remote, rows.length)))
            for n in range(count)
        ]
        made = [reader.lane() for _ in range(count)]
        for lane, share in zip(made, shares, strict=True):
            finish(lane, lane.submit("owner", share))
        best = float("inf")
        for _ in range(REPEATS):
            threads = [
                threading.Thread(
                    target=lambda lane=lane, share=share: finish(lane, lane.submit("owner", share))
                )
                for lane, share in zip(made, shares, strict=True)
            ]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            best = min(best, time.perf_counter() - began)
        for lane in made:
            lane.close()
        reader.seen.setdefault("lanes", {})[count] = {"ms": round(best * 1e3, 2), "rows": len(rows)}


def give_up(reader: Reader) -> None:
    """Close a lane under a read of many pieces, zero the memory: nothing may land in it any more."""
    seen = []
    for _ in range(3):
        lane = reader.lane()
        finish(lane, lane.submit("owner", rows_of(reader, PAGE, shuffled=False, most=1)))
        transfer = lane.submit("owner", rows_of(reader, 16 << 10, shuffled=True))
        before = transfer.state.value
        began = time.perf_counter()
        lane.close()
        closing = time.perf_counter() - began
        reader.wipe()
        time.sleep(0.3)
        seen.append(
            {
                "before": before,
                "after": transfer.state.value,
                "close_ms": round(closing * 1e3, 1),
                "landed": int(torch.count_nonzero(reader.memory).item()),
            }
        )
    reader.seen["give_up"] = seen


def stopped(reader: Reader) -> None:
    """The owner is stopped: a lane that is connected, a new one; closed, and nothing lands when it goes on."""
    rows = rows_of(reader, PAGE, shuffled=True)
    lane = reader.lane()
    finish(lane, lane.submit("owner", rows_of(reader, PAGE, shuffled=False, most=1)))
    owner = reader.owner.pid or 0
    os.kill(owner, signal.SIGSTOP)
    found: dict[str, Any] = {}
    try:
        connected = lane.submit("owner", rows)
        found["connected"] = finish(lane, connected, 3.0).value
        lane.close()
        with_new = _new_lane(reader, rows)
        reader.wipe()
        found |= with_new
    finally:
        os.kill(owner, signal.SIGCONT)
    reader.pipe.send("after SIGCONT")
    found["owner"] = reader.pipe.recv() if reader.pipe.poll(5) else "silent"
    time.sleep(0.5)
    found["landed"] = int(torch.count_nonzero(reader.memory).item())
    again = reader.lane()
    found["again"] = finish(again, again.submit("owner", rows)).value
    again.close()
    reader.seen["stopped"] = found


def _new_lane(reader: Reader, rows: Descriptors) -> dict[str, Any]:
    try:
        lane = reader.lane()
    except Exception as error:  # noqa: BLE001 - what it says is the finding
        return {"new_lane": f"{type(error).__name__}: {error}"}
    try:
        state = finish(lane, lane.submit("owner", rows), 2.0).value
    except Exception as error:  # noqa: BLE001
        state = f"{type(error).__name__}: {error}"
    began = time.perf_counter()
    lane.close()
    return {"new_lane": state, "new_lane_close_ms": round((time.perf_counter() - began) * 1e3, 1)}


def killed(reader: Reader) -> None:
    """The owner is killed: a read says so, or is done, and this process lives on."""
    rows = rows_of(reader, PAGE, shuffled=True)
    lane = reader.lane()
    finish(lane, lane.submit("owner", rows_of(reader, PAGE, shuffled=False, most=1)))
    reader.owner.kill()
    reader.owner.join()
    found: dict[str, Any] = {}
    try:
        transfer = lane.submit("owner", rows)
        found = {"state": finish(lane, transfer, 5.0).value, "reason": transfer.reason}
    except Exception as error:  # noqa: BLE001
        found = {"refused": f"{type(error).__name__}: {error}"}
    lane.close()
    synchronize(reader.memory)
    reader.seen["killed"] = found


def marks(reader: Reader) -> None:
    """A mark behind work on the device is not reached at once, and is in time, asked from another thread."""
    mark = marker(reader.memory.device.type)
    if reader.memory.is_cuda:
        busy = torch.randn(8192, 8192, device=reader.memory.device)
        for _ in range(30):
            busy = torch.tanh(busy @ busy)
    began = time.perf_counter()
    ready = mark()
    found: dict[str, Any] = {"made_us": round((time.perf_counter() - began) * 1e6, 1)}
    if ready is None:
        reader.seen["marks"] = "not needed"
        return
    states = []

    def ask() -> None:
        states.append(ready())
        while not ready():
            time.sleep(1e-4)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(20)
    found |= {
        "at_first": states[0],
        "reached_ms": round((time.perf_counter() - began) * 1e3, 2),
        "still_waiting": asking.is_alive(),
    }
    reader.seen["marks"] = found


def run(backend: str, devices: tuple[str, str], size: int) -> dict[str, Any]:
    """All stages of one backend."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(backend, devices[1], size, theirs), daemon=True)
    owner.start()
    memory = memory_on(devices[0], size)
    home = open_backend(backend, "reader", {})
    began = time.perf_counter()
    home.register([Region(memory.data_ptr(), size, devices[0])])
    registered = time.perf_counter() - began
    if not pipe.poll(60):
        return {"failed": "the owner did not start"}
    metadata, remote = pipe.recv()
    reader = Reader(backend, memory, home, owner, pipe, metadata, remote)
    traits = home.traits
    reader.seen |= {
        "register_ms": round(registered * 1e3, 1),
        "lands": traits.lands,
        "synchronous": traits.synchronous,
    }
    for stage in (read_shapes, read_picks, lanes, give_up, marks, stopped, killed):
        in_thread(stage, reader)
        sys.stderr.write(f"{backend} {stage.__name__} done\n")
    try:
        home.close()
    except Exception as error:  # noqa: BLE001
        reader.seen["close"] = f"{type(error).__name__}: {error}"
    if owner.is_alive():
        owner.kill()
    return reader.seen


def in_thread(stage: Callable[[Reader], None], reader: Reader) -> None:
    """A stage in a thread where no device is current yet, as the connector's threads are."""

    def guarded() -> None:
        try:
            stage(reader)
        except Exception:  # noqa: BLE001 - the next stage is to run
            reader.seen[f"{stage.__name__} failed"] = traceback.format_exc()[-1500:]

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        reader.seen[f"{stage.__name__} failed"] = "not over after 60 s"


def main() -> None:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="reader %(name)s: %(message)s")
    devices = ("cpu", "cpu")
    if chosen.device == "cuda":
        devices = ("cuda:1", "cuda:0") if torch.cuda.device_count() > 1 else ("cuda:0", "cuda:0")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    found: dict[str, Any] = {"devices": devices, "mib": chosen.mib}
    for backend in chosen.backend or ["nixl", "mooncake"]:
        try:
            found[backend] = run(backend, devices, chosen.mib << 20)
        except Exception:  # noqa: BLE001
            found[backend] = {"failed": traceback.format_exc()[-2000:]}
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    with suppress(Exception):
        os._exit(0)  # threads that hang must not hold up the machine


if __name__ == "__main__":
    main()
