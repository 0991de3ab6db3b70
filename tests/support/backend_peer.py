"""A worker to read from: prints one JSON line with its metadata and address, waits for stdin to close."""

import json
import sys

import numpy as np

from kvd.backends.registry import open_backend
from kvd.geometry.model import Region


def pattern(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Bytes that differ from their neighbours, from the same place in other pages, and from zero."""
    return (np.arange(size, dtype=np.int64) * 31 % 251 + 1).astype(np.uint8)


def main() -> None:
    kind, size = sys.argv[1], int(sys.argv[2])
    backend = open_backend(kind, "peer", {})
    memory = pattern(size)
    backend.register([Region(memory.ctypes.data, size)])
    json.dump({"metadata": backend.metadata().hex(), "address": memory.ctypes.data}, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line == "sum\n":
            sys.stdout.write(f"{int(memory.astype(np.int64).sum())}\n")
            sys.stdout.flush()
    backend.close()


if __name__ == "__main__":
    main()
