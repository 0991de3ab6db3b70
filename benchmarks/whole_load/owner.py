"""The process whose memory is read.

python3 -m benchmarks.whole_load.owner SOCKET DEVICE BYTES
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks.whole_load.cache import Cache, Memory, fill, memory_of
from benchmarks.whole_load.child import serve
from kvd.backends.contract import Backend
from kvd.backends.registry import open_backend
from kvd.geometry.codec import encode_worker
from kvd.worker.orders import StageOrder
from kvd.worker.staging import Stager, stager


class Owner:
    """Memory, and a backend over it for each way that is measured."""

    def __init__(self, device: str, size: int) -> None:
        self.words = memory_of(device, size)
        fill(self.words)
        self.opened: dict[str, tuple[Backend, Stager | None]] = {}

    def open(
        self, name: str, kind: str, options: dict[str, Any], memory: Memory, block: int
    ) -> tuple[bytes, bytes, int]:
        """Register the memory: its geometry, the backend's metadata, and how many blocks there are."""
        cache = Cache(self.words, block, memory)
        backend = open_backend(kind, "p", options)
        backend.register(cache.geometry.regions)
        self.opened[name] = (backend, stager(backend, cache.geometry, lambda: None))
        return encode_worker(cache.geometry), backend.metadata(), cache.blocks

    def stage(self, name: str, ids: list[int], tokens: int) -> float:
        """Have peers see these blocks of a backend that stages: seconds that it took."""
        staging = self.opened[name][1]
        if staging is None:
            raise RuntimeError(f"{name} is read as it is")
        began = time.perf_counter()
        staging.stage([StageOrder("r", {0: (0, tuple(ids))}, tokens)])
        return time.perf_counter() - began

    def close(self, name: str) -> None:
        """Give a backend up."""
        if name in self.opened:
            self.opened.pop(name)[0].close()


def main() -> None:
    """Serve."""
    address, device, size = sys.argv[1:]
    if device != "cpu":
        torch.cuda.set_device(device)
    owner = Owner(device, int(size))
    serve(address, {"open": owner.open, "stage": owner.stage, "close": owner.close, "ready": lambda: True})


if __name__ == "__main__":
    main()
