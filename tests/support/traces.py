"""Small traces: two engines of one layer each, and transfers between them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvd.geometry.codec import decode_worker
from kvd.geometry.model import EngineGeometry, Region
from kvd.trace.model import EngineLine, Header, TracedBlocks, TracedEngine, TransferLine
from kvd.trace.streams import writing
from kvd.trace.write import write_trace
from tests.support.daemons import geometry

BLOCKS = 64


def engine(name: str, ranks: int = 1, address: int = 0x7F00_1234_5000) -> TracedEngine:
    """An engine whose workers have one region at ``address``."""
    workers = []
    for rank in range(ranks):
        worker = decode_worker(geometry(rank, BLOCKS))
        [region] = worker.regions
        workers.append(dataclasses.replace(worker, regions=(Region(address, region.length, region.device),)))
    found = EngineGeometry(
        name, f"{name}-gen", "/models/tiny", ranks, 1, 1, tuple(workers), {"dtype": "float32"}
    )
    return TracedEngine(EngineLine(engine_id=name, generation=f"{name}-gen"), found)


def transfer(number: int = 0) -> TransferLine:
    """A transfer of three blocks, from engine 1 to engine 0."""
    return TransferLine(
        transfer=f"r{number}@tp0",
        request=f"r{number}",
        local=0,
        remote=1,
        local_rank="tp0",
        remote_ranks=("tp0",),
        backend="nixl",
        at=number / 10,
        tokens=48,
        bytes=192,
        descriptors=3,
        coalesced_descriptors=2,
        local_blocks=(TracedBlocks(0, 0, ((1, 2), (7, 1))),),
        remote_blocks=(TracedBlocks(0, 0, ((3, 3),)),),
        stages={"queued": 0.001, "wire": 0.002},
        moments={"queued": -0.001, "posted": 0.001, "last": 0.003},
    )


def write(path: Path, transfers: int = 3) -> Path:
    """A trace of that many transfers."""
    with writing(path) as out:
        write_trace(
            out, Header(schema=1, began=1e9), [engine("d"), engine("p")], map(transfer, range(transfers))
        )
    return path
