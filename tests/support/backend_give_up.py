"""Gives up a read from a stopped peer, over tcp; prints one JSON line: what landed afterwards, and who survived.

Arguments: the backend; how the read is given up (``close``, ``nothing``, and for NIXL ``destroy``); the size of the
read in bytes; and what it is posted as (``descriptors``, one of them, or ``selection`` of 16 KiB blocks in descending
order, so many that NIXL's own worker threads would advance them, if there were any).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvd.backends.contract import Lane, SelectingLane, State, Transfer
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection
from tests.support.halting import halt

PEER = Path(__file__).with_name("backend_peer.py")
BLOCK = 16 << 10


def wait(lane: Lane, transfer: Transfer, seconds: float) -> State:
    until = time.monotonic() + seconds
    while lane.poll(transfer) is State.PENDING and time.monotonic() < until:
        time.sleep(1e-4)
    return transfer.state


def post(lane: Lane, whole: Descriptors, posted: str) -> Transfer:
    if posted == "descriptors":
        return lane.submit("peer", whole)
    assert isinstance(lane, SelectingLane)
    blocks = whole.nbytes // BLOCK
    one = np.array([BLOCK], np.int64)
    grid = Grid(whole.local, whole.remote, one, one, one, blocks, blocks)
    cells = np.arange(blocks, dtype=np.int32)[::-1].copy()
    return lane.submit_selection("peer", Selection(grid, cells, cells, whole.nbytes))


def main() -> None:
    kind, how, size, posted = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    peer = subprocess.Popen(
        [sys.executable, str(PEER), kind, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdout is not None
    hello = json.loads(peer.stdout.readline())
    options = {"abandon": "destroy", "drain_s": 0} if how == "destroy" else {}
    backend = open_backend(kind, "reader", options)
    buffer = np.zeros(size, np.uint8)
    backend.register([Region(buffer.ctypes.data, size)])
    stuck, other = backend.lane("stuck"), backend.lane("other")
    whole = Descriptors(*(np.array([v], np.int64) for v in (buffer.ctypes.data, hello["address"], size)))
    try:
        for lane in (stuck, other):
            lane.add("peer", bytes.fromhex(hello["metadata"]))
            assert wait(lane, post(lane, whole, posted), 20) is State.DONE
        halt(peer.pid)
        transfer = post(stuck, whole, posted)
        before = wait(stuck, transfer, 0.2)
        started = time.monotonic()
        if how != "nothing":
            stuck.close()
        took = time.monotonic() - started
        buffer[:] = 0
        os.kill(peer.pid, signal.SIGCONT)
        # Without a close somebody still polls, which is how a connector would look after its other transfers.
        after = wait(stuck, transfer, 20) if how == "nothing" else transfer.state
        result: dict[str, object] = {
            "before": before.value,
            "after": after.value,
            "reason": transfer.reason,
            "close_s": took,
        }
        if how == "close":
            # A read by another lane after the stopped one cannot overtake: once it is done the peer has been running.
            tail = Descriptors(whole.local, whole.remote, np.array([4096], np.int64))
            result["other"] = wait(other, other.submit("peer", tail), 20).value
            assert buffer[:4096].all()
            buffer[:4096] = 0
            remade = backend.lane("remade")
            remade.add("peer", bytes.fromhex(hello["metadata"]))
            result["remade"] = wait(remade, remade.submit("peer", tail), 20).value
            assert buffer[:4096].all()
            buffer[:4096] = 0
        try:
            result["peer"] = peer.wait(0.5)
        except subprocess.TimeoutExpired:
            result["peer"] = None
        result["landed"] = int(np.count_nonzero(buffer))
        json.dump(result, sys.stdout)
        sys.stdout.write("\n")
    finally:
        peer.kill()
    backend.close()


if __name__ == "__main__":
    main()
