"""A small engine with attention alone, and a request that it pushes."""

from __future__ import annotations

import numpy as np

from kvd.geometry.model import EngineGeometry
from kvd.topology.blocks import BlockList
from tests.support import oracle, samples
from tests.support.rigs.send import SendRig

BLOCK = 16


def ids(*numbers: int) -> BlockList:
    return BlockList(0, np.array(numbers, np.int64))


def dense(name: str, *, tp: int = 1, block: int = BLOCK) -> EngineGeometry:
    """Two layers; regions only as large as their blocks."""
    made = samples.engine(name, ("full", block, None, samples.llama(("a", "b"), heads=2, block=block)), tp=tp)
    return shrunk(made)


def shrunk(engine: EngineGeometry) -> EngineGeometry:
    from dataclasses import replace

    from kvd.geometry.model import Region

    workers = []
    for worker in engine.workers:
        lengths = [0] * len(worker.regions)
        for _, layer in worker.layers.values():
            end = layer.offset + (worker.num_blocks - 1) * layer.stride + layer.page.size
            lengths[layer.region] = max(lengths[layer.region], end)
        workers.append(
            replace(
                worker,
                regions=tuple(
                    Region(r.address, max(1, n)) for r, n in zip(worker.regions, lengths, strict=True)
                ),
            )
        )
    return replace(engine, workers=tuple(workers))


REQUEST = oracle.Request(local={0: ids(9, 4, 5)}, remote={0: ids(1, 2, 7)}, tokens=40)
"""Two and a half blocks."""


def announce(rig: SendRig, **more: object) -> list[object]:
    return rig.announce(REQUEST.local, REQUEST.tokens, **more)  # type: ignore[arg-type]
