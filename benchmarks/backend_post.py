"""How long a backend takes to post and complete N descriptors, as ratios to one large transfer in the same run.

    python benchmarks/backend_post.py [--backend nixl] [--mib 64] [--counts 1,100,10000] [--memfd] [--json]

Two backends in two processes; ``contiguous`` descriptors are neighbours on both sides, ``fragmented`` ones leave gaps
and go through the remote side in random order. Absolute times depend on the machine and its load; the ratios much less.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from kvd.backends.contract import Lane, State
from kvd.backends.direct import memfd as direct_memory
from kvd.backends.registry import available, open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

REPEATS = 5


def serve(kind: str, size: int, memfd: bool, pipe: Connection) -> None:
    """The peer: registers memory, sends its metadata and address, waits to be told to end."""
    backend = open_backend(kind, "source", {})
    memory = (
        np.frombuffer(direct_memory.memfd("source", size), np.uint8) if memfd else np.empty(size, np.uint8)
    )
    memory[:] = 1
    backend.register([Region(memory.ctypes.data, size)])
    pipe.send((backend.metadata(), memory.ctypes.data))
    pipe.recv()
    backend.close()


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def once(lane: Lane, rows: Descriptors) -> tuple[float, float]:
    """Seconds until the post returned, and until the transfer was done."""
    started = time.perf_counter()
    transfer = lane.submit("source", rows)
    posted = time.perf_counter() - started
    while lane.poll(transfer) is State.PENDING:
        time.sleep(5e-5)
    if transfer.state is State.FAILED:
        raise SystemExit(f"transfer failed: {transfer.reason}")
    return posted, time.perf_counter() - started


def rows_of(count: int, size: int, local: int, remote: int, *, fragmented: bool) -> Descriptors:
    """``count`` descriptors that cover ``size`` bytes, or half of them where they leave gaps."""
    piece = size // count
    at = np.arange(count, dtype=np.int64) * piece
    length = np.full(count, max(1, piece // 2 if fragmented else piece), np.int64)
    there = np.random.default_rng(0).permutation(at) if fragmented else at
    return Descriptors(at + local, there + remote, length)


def measure(
    kind: str, size: int, counts: list[int], *, memfd: bool = False
) -> list[dict[str, float | int | str]]:
    """One row for each count and shape; the first row is the one large transfer that ratios refer to."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=serve, args=(kind, size, memfd, theirs))
    peer.start()
    metadata, remote = ours.recv()
    backend = open_backend(kind, "target", {})
    buffer = np.ones(size, np.uint8)
    local = buffer.ctypes.data
    backend.register([Region(local, size)])
    other = np.ones(size, np.uint8)
    copies = [seconds(lambda: np.copyto(buffer, other)) for _ in range(REPEATS)]
    started = time.perf_counter()
    lane = backend.lane("source")
    made = time.perf_counter()
    lane.add("source", metadata)
    added = time.perf_counter()
    found: list[dict[str, float | int | str]] = []
    cases = [(1, False)] + [(count, shape) for count in counts for shape in (False, True)]
    once(lane, rows_of(1, size, local, remote, fragmented=False))  # connects
    for count, fragmented in cases:
        rows = rows_of(count, size, local, remote, fragmented=fragmented)
        runs = [once(lane, rows) for _ in range(REPEATS)]
        total = statistics.median(run[1] for run in runs)
        found.append(
            {
                "shape": "fragmented" if fragmented else "contiguous",
                "descriptors": count,
                "bytes": rows.nbytes,
                "post_s": statistics.median(run[0] for run in runs),
                "total_s": total,
                "bytes_per_s": rows.nbytes / total,
            }
        )
        found[-1]["ratio"] = rows.nbytes / total / float(found[0]["bytes_per_s"])
    started_close = time.perf_counter()
    lane.close()
    closed = time.perf_counter()
    found[0] |= {"lane_s": made - started, "add_s": added - made, "close_s": closed - started_close}
    found[0]["memcpy_bytes_per_s"] = size / statistics.median(copies)
    ours.send(None)
    peer.join()
    backend.close()
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--mib", type=int, default=64, help="size of the large transfer in MiB")
    parser.add_argument("--counts", default="1,100,1000,10000", help="numbers of descriptors")
    parser.add_argument(
        "--memfd", action="store_true", help="the peer's memory is a memfd, which direct and auto map"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; seconds and bytes")
    options = parser.parse_args()
    rows = measure(
        options.backend, options.mib << 20, [int(n) for n in options.counts.split(",")], memfd=options.memfd
    )
    if options.json:
        json.dump(
            {"backend": options.backend, "version": available()[options.backend], "rows": rows}, sys.stdout
        )
        sys.stdout.write("\n")
        return
    first = rows[0]
    print(f"lane {first['lane_s']:.4f} s, add {first['add_s']:.4f} s, close {first['close_s']:.4f} s")  # noqa: T201
    print(f"memcpy within one process {float(first['memcpy_bytes_per_s']) / 1e9:.2f} GB/s")  # noqa: T201
    print(f"{'shape':11} {'count':>7} {'post ms':>9} {'total ms':>9} {'GB/s':>6} {'ratio':>6}")  # noqa: T201
    for row in rows:
        times = f"{float(row['post_s']) * 1e3:9.2f} {float(row['total_s']) * 1e3:9.2f}"
        rates = f"{float(row['bytes_per_s']) / 1e9:6.2f} {float(row['ratio']):6.2f}"
        print(f"{row['shape']:11} {row['descriptors']:7} {times} {rates}")  # noqa: T201


if __name__ == "__main__":
    main()
