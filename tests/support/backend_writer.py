"""A worker that writes its memory to a peer's window; one order a line on stdin, one answer a line on stdout.

Arguments: the backend, the size of its memory. An order is {"metadata", "address", "size"}; the answers to it are
{"posted": true} and, when the transfer is over, {"state", "reason"}. Each order gets a lane of its own.
"""

import json
import sys
import time

import numpy as np

from kvd.backends.contract import State
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    kind, size = sys.argv[1], int(sys.argv[2])
    backend = open_backend(kind, "writer", {})
    memory = np.full(size, 7, np.uint8)
    backend.register([Region(memory.ctypes.data, size)])
    for line in sys.stdin:
        order = json.loads(line)
        lane = backend.lane("window")
        lane.add("peer", bytes.fromhex(order["metadata"]))
        columns = (memory.ctypes.data, order["address"], order["size"])
        rows = Descriptors(*(np.array([value], np.int64) for value in columns))
        transfer = lane.submit("peer", rows, "write")
        say({"posted": True})
        while lane.poll(transfer) is State.PENDING:
            time.sleep(1e-4)
        say({"state": transfer.state.value, "reason": transfer.reason})
        lane.close()
    backend.close()


if __name__ == "__main__":
    main()
