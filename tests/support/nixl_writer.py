"""Writes through NIXL into a peer's windows: does what each JSON line on stdin says, and answers with a line.

Argument: the size of its memory, which holds no zero byte. Orders (``do``): ``add`` a ``peer`` by ``metadata``;
``write`` the memory to ``peer`` at ``address`` in ``pieces``, posted ``by`` number or address, looking after it for
``seconds`` at most; ``renew`` the lane. The word go is written when a write is about to be posted.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from kvd.backends.contract import SelectingLane, State, Transfer
from kvd.backends.errors import BackendError
from kvd.backends.nixl.backend import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def post(lane: SelectingLane, order: dict[str, Any], local: int, size: int) -> Transfer:
    """Equal pieces in descending order, each a byte short of its neighbour, so that nothing can merge them."""
    pieces = int(order["pieces"])
    stride = size // pieces
    one, peer = np.array([stride - 1], np.int64), order["peer"]
    if order["by"] == "number":
        steps = np.array([stride], np.int64)
        grid = Grid(np.array([local]), np.array([order["address"]]), one, steps, steps, pieces, pieces)
        cells = np.arange(pieces, dtype=np.int32)[::-1].copy()
        return lane.submit_selection(peer, Selection(grid, cells, cells, pieces * (stride - 1)), "write")
    at = (np.arange(pieces, dtype=np.int64) * stride)[::-1]
    return lane.submit(
        peer, Descriptors(at + local, at + int(order["address"]), np.repeat(one, pieces)), "write"
    )


def write(lane: SelectingLane, order: dict[str, Any], local: int, size: int) -> dict[str, object]:
    started = time.monotonic()
    transfer = post(lane, order, local, size)
    posted = time.monotonic() - started
    while lane.poll(transfer) is State.PENDING and time.monotonic() < started + order.get("seconds", 30):
        time.sleep(5e-5)
    took = time.monotonic() - started
    return {"state": transfer.state.value, "reason": transfer.reason, "posted": posted, "took": took}


def main() -> None:
    size = int(sys.argv[1])
    backend = open_backend("writer", options={})
    memory = (np.arange(size, dtype=np.int64) * 31 % 251 + 1).astype(np.uint8)
    backend.register([Region(memory.ctypes.data, size)])
    lane = backend.lane("writes")
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "add":
                lane.add(order["peer"], bytes.fromhex(order["metadata"]))
                say("added")
            elif order["do"] == "renew":
                lane.close()
                lane = backend.lane("renewed")
                say("renewed")
            else:
                say("go")
                say(write(lane, order, memory.ctypes.data, size))
        except BackendError as error:
            say({"state": type(error).__name__, "reason": str(error)})
    backend.close()


if __name__ == "__main__":
    main()
