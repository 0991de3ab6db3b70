"""A worker's KV cache without a model: memory of one pattern, a geometry over it, and whether bytes are in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank

Memory = Literal["block", "layer"]
"""All layers of a block together, or a memory for each layer."""

LAYERS = 16
TOKEN_BYTES = 64 << 10
"""Of KV over all layers: as in docs/gpu.md."""
UNTOUCHED = -1
_PART = 64
"""Blocks that are compared at a time."""
_PATTERN = 0x5851F42D4C957F2D


@dataclass(frozen=True)
class Cache:
    """``words`` are the memory, eight bytes each; ``block`` is how many tokens a block has."""

    words: Any
    block: int
    memory: Memory

    @property
    def page(self) -> int:
        """Bytes of one layer in one block."""
        return TOKEN_BYTES * self.block // LAYERS

    @property
    def blocks(self) -> int:
        """That fit."""
        return int(self.words.numel()) * 8 // (self.page * LAYERS)

    @property
    def region(self) -> Region:
        """As a worker registers it."""
        return Region(self.words.data_ptr(), self.blocks * LAYERS * self.page, str(self.words.device))

    @property
    def geometry(self) -> WorkerGeometry:
        """As a worker describes it."""
        page, blocks = self.page, self.blocks
        token = page // self.block
        axes = (
            Axis("head", 0, 1, 1, page),
            Axis("token", 0, self.block, 1, token),
            Axis("dim", 0, token // 2, 1, 2),
        )
        shape = (("head", 1), ("token", self.block), ("dim", token // 2))
        kind = Page(page, (Field("kv", "bfloat16", 2, 0, axes, shape),))
        together = self.memory == "block"
        layers = tuple(
            Layer(
                f"l{n}", kind, 0, n * page * (1 if together else blocks), page * (LAYERS if together else 1)
            )
            for n in range(LAYERS)
        )
        return WorkerGeometry(Rank(), blocks, (self.region,), (Group(0, "full", self.block, layers),))

    def wrong(self, mine: list[int], theirs: list[int]) -> int:
        """Words that are not what they should be, once these blocks were copied onto memory that was cleared."""
        each = self.page // 8 * (LAYERS if self.memory == "block" else 1)
        parts = self.words[: self.blocks * LAYERS * self.page // 8].view(-1, self.blocks, each)
        device, count = self.words.device, 0
        inside = torch.arange(each, device=device)
        here, there = (torch.tensor(ids, device=device) for ids in (mine, theirs))
        other = torch.ones(self.blocks, dtype=torch.bool, device=device)
        other[here] = False
        for number, layer in enumerate(parts):
            for at in range(0, len(mine), _PART):
                source = there[at : at + _PART, None] + number * self.blocks
                expected = pattern(source * each + inside)
                count += int((layer[here[at : at + _PART]] != expected).sum())
            count += int((layer[other] != UNTOUCHED).sum())
        return count


def pattern(places: Any) -> Any:
    """The word at each place of a memory that is read from."""
    return places * _PATTERN + 1


def memory_of(device: str, size: int) -> Any:
    """Memory of ``size`` bytes in words."""
    return torch.empty(size // 8, dtype=torch.int64, device=device)


def fill(words: Any) -> None:
    """Write the pattern."""
    step = 32 << 20
    for at in range(0, len(words), step):
        end = min(len(words), at + step)
        words[at:end] = pattern(torch.arange(at, end, device=words.device))
    settle(words.device)


def clear(words: Any) -> None:
    """Make it memory that nothing was copied to."""
    words.fill_(UNTOUCHED)
    settle(words.device)


def settle(device: Any) -> None:
    """Wait for a device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def some_blocks(cache_blocks: int, count: int, seed: int) -> list[int]:
    """Scattered ones; 0 is vLLM's null block."""
    dice = np.random.default_rng(seed)
    found: list[int] = (1 + dice.permutation(cache_blocks - 1)[:count]).tolist()
    return found
