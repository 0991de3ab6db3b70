"""What checksums of KV cost: seconds for each GiB, and as a ratio to copying the same bytes in the same run.

    python benchmarks/checksum.py [--device cpu|cuda:0] [--mib 256] [--rounds 7] [--kinds llama,mla] [--json]

``prefill`` is what a prefilling worker does (sums block by block), ``decode`` what a decoding one does (sums of all
blocks together). Blocks are neighbours (``run``) or lie in random order (``scattered``). One core, or one device.
Prefill, decode and copy take turns. On a device its sums are held against numpy's first.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from kvd.geometry.live import BlockAxes, Dim, LiveTensor, attention_layer, latent_layer
from kvd.geometry.model import Group, Layer, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.geometry.shards import Share
from kvd.geometry.states import StateShape, state_layer
from kvd.topology.blocks import BlockList
from kvd.topology.checksums.comparison import comparison
from kvd.topology.checksums.sums import InMemory, TokenSpan, layer_sums
from kvd.topology.plan import plan_worker
from kvd.vllm.memory.page_sums import OnDevice, summer_of

GIB = 1 << 30


def _tensor(address: int, shape: tuple[int, ...], itemsize: int) -> LiveTensor:
    strides = tuple(itemsize * prod(shape[i + 1 :]) for i in range(len(shape)))
    return LiveTensor("layer", address, shape, strides, "bfloat16", itemsize)


def attention(layout: str, size: int, block: int = 16) -> Callable[[Region], tuple[Layer, int]]:
    """8 heads of 128, bfloat16, keys and values joined, in the order that ``layout`` says."""

    def make(region: Region) -> tuple[Layer, int]:
        blocks = size // (8 * block * 512)
        shape = (8, block) if layout == "HND" else (block, 8)
        inner: tuple[Dim, Dim] = ("head", "token") if layout == "HND" else ("token", "head")
        layer = attention_layer(
            _tensor(region.address, (blocks, *shape, 256), 2), (region,), dims=("block", *inner, "key+value"),
            blocks=BlockAxes(blocks, block), heads=Share(0, 8, 8), key_size=128, value_size=128,
        )  # fmt: skip
        return layer, blocks

    return make


def latent(size: int) -> Callable[[Region], tuple[Layer, int]]:
    """Latents of 576, bfloat16, blocks of 64."""

    def make(region: Region) -> tuple[Layer, int]:
        blocks = size // (64 * 1152)
        layer = latent_layer(
            _tensor(region.address, (blocks, 1, 64, 576), 2), (region,),
            dims=("block", "head", "token", "dim"), blocks=BlockAxes(blocks, 64), size=576,
        )  # fmt: skip
        return layer, blocks

    return make


def states(size: int) -> Callable[[Region], tuple[Layer, int]]:
    """States of a Gated DeltaNet layer: 32 heads of 128 x 128 float32, convolutions of 8192 channels."""

    def make(region: Region) -> tuple[Layer, int]:
        page = 32 * 128 * 128 * 4 + 3 * 8192 * 2
        blocks = size // page
        layer = state_layer(
            _tensor(region.address, (blocks, page), 1), (region,), rank=0, ranks=1, block_stride=page,
            state=StateShape(
                "gdn", conv=((3, 8192), "bfloat16", 2), ssm=((32, 128, 128), "float32", 4), heads=32
            ),
        )  # fmt: skip
        return layer, blocks

    return make


def kinds(size: int) -> dict[str, tuple[Callable[[Region], tuple[Layer, int]], int]]:
    """What is measured: how to make a layer of so many bytes, and the tokens of a block (0: a state)."""
    return {
        "llama HND": (attention("HND", size), 16),
        "llama NHD": (attention("NHD", size), 16),
        "mla": (latent(size), 64),
        "gdn states": (states(size), 0),
    }


class Memory:
    """Random bytes on a device, as much again to copy them to, and what adds them up."""

    def __init__(self, device: str, size: int) -> None:
        self.device = device
        if device == "cpu":
            self.source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
            self.target = np.zeros_like(self.source)
            address = int(self.source.ctypes.data)
        else:
            import torch

            self.torch = torch
            self.source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
            self.target = torch.zeros_like(self.source)
            address = int(self.source.data_ptr())
        self.region = Region(address, size, device)

    def summer(self, worker: WorkerGeometry) -> Any:
        """What the connector uses on this device."""
        return summer_of(worker) if self.device == "cpu" else OnDevice(worker.regions)

    def copy(self, nbytes: int) -> None:
        """Copy so many bytes, to the end."""
        if self.device == "cpu":
            np.copyto(self.target[:nbytes], self.source[:nbytes])
        else:
            self.target[:nbytes].copy_(self.source[:nbytes])
            self.torch.cuda.synchronize()


def check(memory: Memory, layer: Layer, summer: Any, block: int) -> None:
    """Exit where a device adds up something else than numpy does of a copy of the same bytes."""
    if memory.device == "cpu":
        return
    ids = np.array([0, 1, 2, 5, 3], np.int64)
    firsts = np.arange(len(ids)) * max(1, block)
    span = TokenSpan(1 if block else 0, int(firsts[-1]) + max(1, block // 2))
    copied = InMemory([memory.source.cpu().numpy()])
    ours, theirs = (layer_sums(layer, by, firsts=firsts, ids=ids, span=span) for by in (copied, summer))
    if not (ours == theirs).all():
        raise SystemExit(
            f"{memory.device} has other sums than numpy: {theirs.ravel()[:4]}, {ours.ravel()[:4]}"
        )


def measure(memory: Memory, name: str, rounds: int) -> list[dict[str, Any]]:
    """Both sides of one kind, with blocks as neighbours and scattered."""
    make, block = kinds(memory.region.length)[name]
    layer, count = make(memory.region)
    kind: Any = "full" if block else "mamba"
    worker = WorkerGeometry(Rank(), count, (memory.region,), (Group(0, kind, block or 16, (layer,)),))
    summer = memory.summer(worker)
    check(memory, layer, summer, block)
    plan = plan_worker(worker, (worker,), (worker,))
    nbytes = count * layer.page.content
    rows = []
    for order in ("run", "scattered"):
        ids = np.arange(count) if order == "run" else np.random.default_rng(2).permutation(count)
        numbers = np.arange(count, dtype=np.int64)
        tokens = count * block
        firsts = numbers * block
        span = TokenSpan(0, tokens) if block else TokenSpan(0, count)

        def prefill(ids: Any = ids, firsts: Any = firsts, span: TokenSpan = span) -> object:
            return layer_sums(
                layer, summer, firsts=firsts if block else np.arange(len(ids)), ids=ids, span=span
            )

        if block:
            against = comparison(plan, worker, (worker,), {0: BlockList(0, ids)}, tokens=tokens, total=tokens)

            def decode(against: Any = against) -> object:
                return against.own_sums(summer)

        else:  # a load has one state, and a benchmark has many
            decode = prefill  # type: ignore[assignment]
        ways: dict[str, Callable[[], object]] = {
            "prefill": prefill, "decode": decode, "copy": lambda: memory.copy(nbytes),
        }  # fmt: skip
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, work in ways.items():
                began = time.perf_counter()
                work()
                if number:  # the first round maps memory and makes recipes
                    times[way].append(time.perf_counter() - began)
        copied = statistics.median(times["copy"])
        for way in ("prefill", "decode"):
            seconds = statistics.median(times[way])
            rows.append(
                {
                    "kind": name,
                    "blocks": order,
                    "side": way,
                    "seconds_per_gib": seconds / nbytes * GIB,
                    "copy_seconds_per_gib": copied / nbytes * GIB,
                    "over_copy": seconds / copied,
                }
            )
    return rows


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", default=",".join(kinds(1 << 30)))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    memory = Memory(given.device, given.mib << 20)
    rows = [row for name in given.kinds.split(",") for row in measure(memory, name, given.rounds)]
    if given.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    sys.stdout.write(
        "| kind | blocks | side | s/GiB | copy, s/GiB | over copy |\n|---|---|---|---|---|---|\n"
    )
    for row in rows:
        sys.stdout.write(
            f"| {row['kind']} | {row['blocks']} | {row['side']} | {row['seconds_per_gib']:.3f} |"
            f" {row['copy_seconds_per_gib']:.3f} | {row['over_copy']:.1f} |\n"
        )


if __name__ == "__main__":
    main()
