"""The process whose memory is read: what it holds there, and how it is started, told and ended."""
# ruff: noqa: T201, S101 - a process that is talked to by lines

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvd.backends.direct.backend import DirectBackend, DirectOptions
from kvd.geometry.model import Region

MIB = 1 << 20
LARGE, SMALL = 1024 * MIB, 64 * MIB
"""Bytes of the two tensors that a worker registers."""


def pattern(offsets: Any, tensor: int) -> Any:
    """The byte at each offset of an owner's tensor: no two places within 16 MiB look alike for long."""
    return ((offsets * 37 + (offsets >> 8) * 11 + (offsets >> 16) * 101 + tensor * 59) & 0xFF).to(torch.uint8)


def tensors(device: str) -> list[Any]:
    """A worker's memory, not filled."""
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in (LARGE, SMALL)]


def fill(memory: list[Any]) -> None:
    """Write the pattern, in parts, as offsets take eight times the memory."""
    for number, tensor in enumerate(memory):
        for start in range(0, len(tensor), 64 * MIB):
            end = min(len(tensor), start + 64 * MIB)
            tensor[start:end] = pattern(torch.arange(start, end, device=tensor.device), number)
    torch.cuda.synchronize(memory[0].device)


def regions(memory: list[Any]) -> list[Region]:
    """As a worker registers them."""
    return [Region(t.data_ptr(), len(t), str(t.device)) for t in memory]


def own(device: str) -> None:
    """The owner's process: one JSON line with metadata and addresses, then obeys lines on stdin."""
    torch.cuda.set_device(device)
    memory = tensors(device)
    fill(memory)
    backend = DirectBackend("owner", DirectOptions())
    backend.register(regions(memory))
    addresses = [t.data_ptr() for t in memory]
    print(json.dumps({"metadata": backend.metadata().hex(), "addresses": addresses}), flush=True)
    for line in sys.stdin:
        if line == "close\n":
            backend.close()
        print("done", flush=True)


@dataclass
class Owner:
    """A started owner."""

    process: subprocess.Popen[str]
    metadata: bytes
    addresses: list[int]

    def order(self, word: str) -> None:
        """Tell it, and wait until it did."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@contextmanager
def owner(device: str, **environ: str) -> Iterator[Owner]:
    """An owner on a device, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_direct.owner", device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the owner on {device} ended before it had registered")
        hello = json.loads(line)
        yield Owner(process, bytes.fromhex(hello["metadata"]), hello["addresses"])
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    own(sys.argv[1])
