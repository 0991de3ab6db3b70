"""Zeroing what a load leaves of its blocks, alone: every byte inside and outside of it, and how long it takes.

    python3 -m benchmarks.gpu.zeroing DEVICE

DEVICE is a device number, or cpu. One JSON object for each shape goes to stdout, each on a line that begins with
`RESULT`. Layers have allocations of their own, or one for all, as in engines.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvd.backends import zeroing
from kvd.geometry.model import Region
from kvd.topology.leftover import Runs

BYTE = 0xFF
BLOCKS = {"cuda": 128, "cpu": 24}
TOKENS = 64
KEPT = 20
"""Tokens of a block that a load has written: the others are zeroed."""
ROUNDS = 20
PIECES = 64
"""Products that keep a device busy meanwhile."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Pages of ``heads`` rows of tokens of ``width`` bytes, in so many layers; ``joined``: in one allocation."""

    name: str
    layers: int
    heads: int
    width: int
    joined: bool = False


SHAPES = (
    Shape("heads of 256 bytes a token", 32, 8, 512),
    Shape("latents of 576 elements", 60, 1, 1152),
    Shape("heads, all layers of a block together", 32, 8, 512, joined=True),
)


def main() -> int:
    """Every shape with one and with several blocks; 1 where a byte is wrong."""
    device = sys.argv[1]
    wrong = 0
    works = [(shape, count) for shape in SHAPES for count in (1, 16)]
    for number, (shape, count) in enumerate(works, start=1):
        found: dict[str, Any] = {"shape": shape.name, "layers": shape.layers, "blocks": count}
        found["more"] = number < len(works)
        # In a thread of its own, where no device is current yet, as the connector's are.
        thread = threading.Thread(
            target=lambda shape=shape, count=count, found=found: found.update(measure(device, shape, count))
        )
        thread.start()
        thread.join()
        wrong += not found.get("right", False)
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")
        sys.stdout.flush()
    return 1 if wrong else 0


def measure(device: str, shape: Shape, count: int) -> dict[str, Any]:
    """One shape: whether each byte is what it must be, and seconds."""
    tensors, pages = _memory(device, shape)
    ids = np.random.default_rng(1).permutation(np.arange(1, blocks_on(device)))[:count]
    try:
        runs = _runs(pages, shape, ids)
        regions = [Region(t.data_ptr(), t.numel(), str(t.device)) for t in tensors]
        began = time.perf_counter()
        zeroing.zero(regions, runs)
        first = time.perf_counter() - began
        right = _right(pages, ids)
        idle = _times(regions, runs)
        busy = _busy(tensors[0], lambda: _times(regions, runs)) if device != "cpu" else None
    except Exception as error:  # noqa: BLE001 - what it says is the finding
        return {"right": False, "error": f"{type(error).__name__}: {error}"}
    return {
        "right": right,
        "runs": len(runs),
        "bytes": runs.nbytes,
        "first": first,
        "seconds": idle,
        "busy": busy,
    }


def blocks_on(device: str) -> int:
    """How many blocks the memory has."""
    return BLOCKS["cpu" if device == "cpu" else "cuda"]


def _memory(device: str, shape: Shape) -> tuple[list[Any], list[Any]]:
    """Allocations, and of each layer its pages: (block, head, token, byte)."""
    import torch

    where = "cpu" if device == "cpu" else f"cuda:{device}"
    page = shape.heads * TOKENS * shape.width
    blocks = blocks_on(device)
    each = (blocks, shape.heads, TOKENS, shape.width)
    if shape.joined:
        whole = torch.full((blocks * shape.layers * page,), BYTE, dtype=torch.uint8, device=where)
        by_layer = whole.view(blocks, shape.layers, *each[1:])
        return [whole], [by_layer[:, layer] for layer in range(shape.layers)]
    made = [torch.full((blocks * page,), BYTE, dtype=torch.uint8, device=where) for _ in range(shape.layers)]
    if where != "cpu":
        torch.cuda.synchronize(where)
    return made, [tensor.view(each) for tensor in made]


def _runs(pages: list[Any], shape: Shape, ids: Any) -> Runs:
    heads = np.arange(shape.heads)
    found = [
        (
            view.data_ptr() + KEPT * shape.width + ids[:, None] * view.stride(0) + heads * view.stride(1)
        ).ravel()
        for view in pages
    ]
    address = np.sort(np.concatenate(found)).astype(np.int64)
    return Runs(address, np.full(len(address), (TOKENS - KEPT) * shape.width, np.int64))


def _right(pages: list[Any], ids: Any) -> bool:
    """Zero where it must be, and nowhere else."""
    import torch

    for view in pages:
        wanted = torch.full_like(view, BYTE)
        wanted[torch.tensor(ids.tolist(), device=view.device), :, KEPT:] = 0
        if not torch.equal(view, wanted):
            return False
    return True


def _times(regions: list[Region], runs: Runs) -> float:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        zeroing.zero(regions, runs)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _busy(near: Any, work: Any) -> Any:
    """The same while the device computes on another stream."""
    import torch

    with torch.cuda.device(near.device):
        some = torch.randn(8192, 8192, dtype=torch.bfloat16, device=near.device)
        some @ some
        torch.cuda.synchronize()
        for _ in range(PIECES):
            some @ some
        found = work()
        torch.cuda.synchronize()
    return found


if __name__ == "__main__":
    sys.exit(main())
