"""What is moved: block ids for requests of so many tokens, in blocks that lie together or apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology.blocks import BlockList, moved_blocks

CaseBlocks = dict[int, BlockList]

_RUNS = {"runs-of-4": 4, "random": 1}


@dataclass(frozen=True)
class MovedRequest:
    """One request: its blocks by group on the reading and on the supplying side."""

    name: str
    tokens: int
    reader: CaseBlocks
    source: CaseBlocks


def requests(
    reader: WorkerGeometry, source: WorkerGeometry, tokens: int, count: int, fragmentation: str
) -> list[MovedRequest]:
    """``count`` requests whose blocks are all different, the same every time.

    Raises `ValueError` where either side has too few blocks.
    """
    sides = []
    for number, worker in enumerate((reader, source)):
        needs = [moved_blocks(group, tokens) for group in worker.groups]
        total = count * sum(needed for _, needed in needs)
        if total > worker.num_blocks - 1:
            raise ValueError(f"{total} blocks are needed and {worker.num_blocks - 1} are there")
        free = _order(worker.num_blocks, fragmentation, seed=number).tolist()
        sides.append(
            [
                {
                    group.index: BlockList(first, np.array([free.pop() for _ in range(needed)], np.int64))
                    for group, (first, needed) in zip(worker.groups, needs, strict=True)
                }
                for _ in range(count)
            ]
        )
    return [
        MovedRequest(f"request-{number}", tokens, mine, theirs)
        for number, (mine, theirs) in enumerate(zip(*sides, strict=True))
    ]


def blocks_needed(worker: WorkerGeometry, tokens: int, count: int = 1) -> int:
    """Blocks that ``count`` requests take of a worker, with the null block that vLLM keeps."""
    return 1 + count * sum(moved_blocks(group, tokens)[1] for group in worker.groups)


def whole_tokens(engines: Sequence[EngineGeometry], tokens: int) -> int:
    """``tokens`` rounded up so that blocks end together on both sides: then every byte of every block is moved."""
    sizes = [g.block_size for e in engines for w in e.workers for g in w.groups if g.kind != "mamba"]
    unit = math.lcm(*sizes) if sizes else 1
    return -(-tokens // unit) * unit


def to_plain(request: MovedRequest) -> dict[str, Any]:
    """As JSON takes it."""
    sides = {"reader": request.reader, "source": request.source}
    return {"name": request.name, "tokens": request.tokens} | {
        side: {str(group): [of.first, of.ids.tolist()] for group, of in blocks.items()}
        for side, blocks in sides.items()
    }


def from_plain(plain: Mapping[str, Any]) -> MovedRequest:
    """The inverse of `to_plain`."""
    reader, source = (
        {int(group): BlockList(first, np.array(ids, np.int64)) for group, (first, ids) in plain[side].items()}
        for side in ("reader", "source")
    )
    return MovedRequest(plain["name"], plain["tokens"], reader, source)


def _order(blocks: int, fragmentation: str, seed: int) -> Any:
    """Free block ids, block 0 left out, to be taken from the end."""
    ids = np.arange(blocks - 1, 0, -1, dtype=np.int64)
    if fragmentation == "contiguous":
        return ids
    if fragmentation == "freed":
        return ids[::-1]
    run = _RUNS[fragmentation]
    dice = np.random.default_rng(seed)
    # What does not make a whole run is taken last.
    whole = len(ids) // run * run
    runs = ids[len(ids) - whole :].reshape(-1, run)
    return np.concatenate([ids[: len(ids) - whole], dice.permutation(runs).ravel()])
