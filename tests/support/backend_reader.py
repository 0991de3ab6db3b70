"""Reads from and writes to a peer process through one backend; prints exactly one JSON line: what it found."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from kvd.backends.contract import Lane, SelectingLane, State, Transfer
from kvd.backends.errors import BackendError
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection

PEER = Path(__file__).with_name("backend_peer.py")
SIZE = 32 << 20
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def wait(lane: Lane, transfer: Transfer) -> State:
    until = time.monotonic() + 20
    while lane.poll(transfer) is State.PENDING and time.monotonic() < until:
        time.sleep(5e-5)
    return transfer.state


def refusal(lane: Lane, rows: Descriptors) -> list[str]:
    try:
        lane.submit("peer", rows)
    except BackendError as error:
        return [type(error).__name__, str(error), error.hint]
    return []


def selection(lane: Lane, buffer: Bytes, expected: Bytes, remote: int) -> list[object]:
    """Random cells of a grid by address and by number: how each ended, and whether the bytes are the same and right."""
    assert isinstance(lane, SelectingLane)
    dice = np.random.default_rng(11)
    rows, pages, others = 24, 1024, 896
    page, other = SIZE // pages, SIZE // others
    offsets = np.arange(rows) * (page // rows)
    grid = Grid(
        offsets + buffer.ctypes.data,
        np.sort(dice.choice(other - page, rows, replace=False)) + remote,
        dice.integers(1, page // rows, rows),
        np.full(rows, page),
        np.full(rows, other),
        pages,
        others,
    )
    found: list[object] = []
    for blocks in (1, 100, 700):
        mine, theirs = dice.permutation(pages)[:blocks], dice.permutation(others)[:blocks]
        row = np.arange(rows)[:, None]
        here, there = (
            (row * n + ids).ravel().astype(np.int32) for n, ids in ((pages, mine), (others, theirs))
        )
        some = Selection(grid, here, there, int(grid.length.sum()) * blocks)
        plain = some.descriptors()
        image = np.zeros(SIZE, np.uint8)
        for local, source, length in zip(plain.local, plain.remote, plain.length, strict=True):
            at, begin = local - buffer.ctypes.data, source - remote
            image[at : at + length] = expected[begin : begin + length]
        for by_number in (False, True):
            buffer[:] = 0
            transfer = lane.submit_selection("peer", some) if by_number else lane.submit("peer", plain)
            found += [wait(lane, transfer).value, bool((buffer == image).all())]
    return found


def killed(peer: subprocess.Popen[str], lane: Lane, rows: Descriptors) -> dict[str, object]:
    """Kill the peer while a transfer is under way, then close the lane."""
    os.kill(peer.pid, signal.SIGSTOP)
    transfer = lane.submit("peer", rows)
    os.kill(peer.pid, signal.SIGKILL)
    peer.wait()
    if wait(lane, transfer) is State.DONE:  # shared memory had copied it all before the signal came
        transfer = lane.submit("peer", rows)
        wait(lane, transfer)
    found: dict[str, object] = {"killed": [transfer.state.value, transfer.reason]}
    started = time.monotonic()
    lane.close()
    lane.close()
    found["close_s"] = time.monotonic() - started
    gc.collect()
    found["agents"] = sum(type(o).__name__ == "nixl_agent" and hasattr(o, "agent") for o in gc.get_objects())
    return found


def main() -> None:
    kind = sys.argv[1]
    found: dict[str, object] = {}
    peer = subprocess.Popen(
        [sys.executable, str(PEER), kind, str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdout is not None
    assert peer.stdin is not None
    hello = json.loads(peer.stdout.readline())
    metadata, remote = bytes.fromhex(hello["metadata"]), int(hello["address"])
    backend = open_backend(kind, "reader", {})
    buffer = np.zeros(SIZE, np.uint8)
    local = buffer.ctypes.data
    backend.register([Region(local, SIZE)])
    lane, second = backend.lane("one"), backend.lane("two")
    lane.add("peer", metadata)
    second.add("peer", metadata)
    expected = (np.arange(SIZE, dtype=np.int64) * 31 % 251 + 1).astype(np.uint8)

    whole = Descriptors(*(np.array([v], np.int64) for v in (local, remote, SIZE)))
    transfer = lane.submit("peer", whole)
    found["whole"] = [wait(lane, transfer).value, bool((buffer == expected).all())]

    # Fragments of odd sizes at odd places, in shuffled order, leaving gaps that must stay untouched.
    buffer[:] = 0
    rng = np.random.default_rng(7)
    starts = np.arange(0, SIZE - 8192, 8192, dtype=np.int64)
    starts += rng.integers(0, 4096, len(starts))
    lengths = rng.integers(1, 4097, len(starts))
    sources = rng.permutation(starts)
    state = wait(lane, lane.submit("peer", Descriptors(starts + local, sources + remote, lengths)))
    image = np.zeros(SIZE, np.uint8)
    for start, source, length in zip(starts, sources, lengths, strict=True):
        image[start : start + length] = expected[source : source + length]
    found["fragments"] = [state.value, bool((buffer == image).all())]

    if isinstance(lane, SelectingLane):
        found["picks"] = selection(lane, buffer, expected, remote)

    buffer[:] = 3
    rows = Descriptors(*(np.array([v + 5], np.int64) for v in (local, remote, 1000)))
    found["write"] = wait(lane, lane.submit("peer", rows, "write")).value
    peer.stdin.write("sum\n")
    peer.stdin.flush()
    changed = expected.astype(np.int64)
    changed[5:1010] = 3
    found["written"] = int(peer.stdout.readline()) == int(changed.sum())

    tail = Descriptors(*(np.array([v], np.int64) for v in (local + SIZE - 999, remote + SIZE - 999, 999)))
    found["unregistered_remote"] = refusal(lane, Descriptors(tail.local, tail.remote + 1, tail.length))
    found["unregistered_local"] = refusal(lane, Descriptors(tail.local + 1, tail.remote, tail.length))
    found["copying"] = sorted(t.name for t in threading.enumerate() if t.name.startswith("kvd-copy"))

    found |= killed(peer, lane, whole)
    backend.close()
    backend.close()
    json.dump(found, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
