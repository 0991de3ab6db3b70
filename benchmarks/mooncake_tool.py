"""Mooncake's own `transfer_engine_bench` beside what `kvctl benchmark` measures with, at the same shapes, in turns.

    python benchmarks/mooncake_tool.py [--shapes 65536x128,1048576x16,8192x128] [--rounds 5] [--seconds 3] [--json]

Both read over tcp on loopback with one thread: batches of so many blocks that follow each other on both sides, one
batch after the other. The tool is part of Mooncake's wheel. It spins until a batch is over; ours looks as the connector
does. NIXL's wheel has no such tool.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvctl.bench.moving import pause
from kvd.backends.contract import Lane, State
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

BUFFER = 256 << 20
START_SECONDS = 60.0
LISTENING = re.compile(r"P2P handshake, listening on (\S+)")
THROUGHPUT = re.compile(r"throughput ([\d.]+) GB/s")


def tool(*flags: str) -> list[str]:
    """Its command line."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("mooncake is not installed")
    program = Path(spec.submodule_search_locations[0]) / "transfer_engine_bench"
    common = ("--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--buffer_size={BUFFER}")
    return [str(program), *common, *flags]


def environment() -> dict[str, str]:
    """What the tool runs in: without the settings of Mooncake's that our adapter makes, its log tells its address."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MC_")}


@contextlib.contextmanager
def target(folder: Path) -> Iterator[str]:
    """The tool's other side; gives the address under which its initiator finds it."""
    log = folder / "target.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            tool("--mode=target", "--local_server_name=127.0.0.1:15999"),
            stdout=out,
            stderr=out,
            env=environment(),
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not (found := LISTENING.search(log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the tool's target did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.1)
        time.sleep(1)  # its buffers are registered after it listens
        yield found.group(1)
    finally:
        process.kill()
        process.wait()


def by_tool(segment: str, block: int, batch: int, seconds: int) -> float:
    """Bytes per second that the tool reports."""
    done = subprocess.run(
        tool(
            "--mode=initiator",
            "--local_server_name=127.0.0.1:15998",
            f"--segment_id={segment}",
            "--operation=read",
            "--threads=1",
            f"--block_size={block}",
            f"--batch_size={batch}",
            f"--duration={seconds}",
            "--report_precision=4",
        ),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    found = THROUGHPUT.search(done.stdout + done.stderr)
    if not found:
        raise SystemExit(f"the tool reported no throughput:\n{done.stdout}{done.stderr}")
    return float(found.group(1)) * 1e9


def serve(pipe: Connection) -> None:
    """Our other side."""
    os.dup2(2, 1)
    backend = open_backend("mooncake", "source", {"host": "127.0.0.1"})
    memory = np.ones(BUFFER, np.uint8)
    backend.register([Region(memory.ctypes.data, BUFFER)])
    pipe.send((backend.metadata(), memory.ctypes.data))
    pipe.recv()
    os._exit(0)


def by_us(lane: Lane, addresses: tuple[int, int], block: int, batch: int, seconds: float) -> float:
    """Bytes per second through our adapter."""
    at = np.arange(batch, dtype=np.int64) * block
    rows = Descriptors(at + addresses[0], at + addresses[1], np.full(batch, block, np.int64))
    moved, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        transfer = lane.submit("source", rows)
        while lane.poll(transfer) is State.PENDING:
            pause(transfer.posted)
        if transfer.state is State.FAILED:
            raise SystemExit(transfer.reason)
        moved += rows.nbytes
    return moved / (time.perf_counter() - started)


def measure(shapes: list[tuple[int, int]], rounds: int, seconds: int) -> list[dict[str, Any]]:
    """A line for each shape."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    metadata, remote = ours.recv()
    backend = open_backend("mooncake", "reader", {"host": "127.0.0.1"})
    memory = np.ones(BUFFER, np.uint8)
    backend.register([Region(memory.ctypes.data, BUFFER)])
    lane = backend.lane("source")
    lane.add("source", metadata)
    found: dict[tuple[int, int], dict[str, list[float]]] = {
        shape: {"tool": [], "ours": []} for shape in shapes
    }
    try:
        with tempfile.TemporaryDirectory() as folder, target(Path(folder)) as segment:
            for _ in range(rounds):
                for (block, batch), rates in found.items():
                    rates["tool"].append(by_tool(segment, block, batch, seconds))
                    rates["ours"].append(by_us(lane, (memory.ctypes.data, remote), block, batch, seconds))
    finally:
        process.kill()
        process.join()
    return [
        {
            "block": block,
            "batch": batch,
            "bytes_per_s": {name: median(values) for name, values in rates.items()},
            "spread": {name: [min(values), max(values)] for name, values in rates.items()},
            "ours_over_tool": median(a / b for a, b in zip(rates["ours"], rates["tool"], strict=True)),
        }
        for (block, batch), rates in found.items()
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="8192x128,65536x128,1048576x16", help="bytes of a block x blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    shapes = [(int(a), int(b)) for a, b in (text.split("x") for text in given.shapes.split(","))]
    lines = measure(shapes, given.rounds, given.seconds)
    if given.json:
        sys.stdout.write(json.dumps({"load": os.getloadavg()[0], "lines": lines}) + "\n")
    else:
        for line in lines:
            rates = ", ".join(
                f"{name} {value / 1e9:.2f} ({line['spread'][name][0] / 1e9:.2f} to {line['spread'][name][1] / 1e9:.2f})"
                for name, value in line["bytes_per_s"].items()
            )
            sys.stdout.write(
                f"{line['batch']:4} blocks of {line['block'] / 1024:6.0f} KiB: GB/s: {rates};"
                f" ours is {line['ours_over_tool']:.2f} of the tool\n"
            )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
