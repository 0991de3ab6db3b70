"""A staged worker in a process of its own: prints one JSON line, then obeys lines; its engine reaches nobody there."""

import json
import sys

import numpy as np

from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from tests.support.backend_peer import pattern


def main() -> None:
    size, memfd = int(sys.argv[1]), sys.argv[2] == "memfd"
    backend = open_backend("staged", "peer", {"engine": "memory", "memfd": memfd})
    memory = pattern(size)
    at = memory.ctypes.data
    backend.register([Region(at, size)])
    sys.stdout.write(json.dumps({"metadata": backend.metadata().hex(), "address": at}) + "\n")
    sys.stdout.flush()
    whole = Descriptors(*(np.array([value], np.int64) for value in (at, at, size)))
    orders = {"stage": lambda: backend.stage(whole), "zero": lambda: memory.fill(0), "close": backend.close}  # type: ignore[attr-defined]
    for line in sys.stdin:
        orders[line.strip()]()
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
