"""What a trace holds: its lines as structs with their bounds, and the whole with geometries decoded.

One JSON object a line: a `Header`, then each `EngineLine` followed by its `WorkerLine`s, then the `TransferLine`s in
order of their start, then `End`. Engines are numbered in the order in which they stand there; transfers name them by
number. Nothing in a trace is an address: regions keep their sizes and how they adjoin, and no host, process or socket
is named. Times are seconds after ``Header.began``.

Schema versions
    1  the first one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from kvd.geometry.model import EngineGeometry
from kvd.topology.blocks import BlockList

SCHEMA = 1
MAX_ID = (1 << 40) - 1
MAX_BLOCKS = 1 << 22
"""Blocks of one side of one transfer: 64 million tokens in blocks of 16."""
MAX_RUNS = 1 << 16
"""Runs of one list of blocks."""

TraceNumber = Annotated[int, Meta(ge=0, le=1 << 62)]
BlockId = Annotated[int, Meta(ge=0, le=MAX_ID)]
BlockCount = Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
TraceName = Annotated[str, Meta(max_length=4096)]
Span = Annotated[float, Meta(ge=0, le=1e9)]
Instant = Annotated[float, Meta(ge=0, le=1e11)]
Moment = Annotated[float, Meta(ge=-1e9, le=1e9)]


class Header(msgspec.Struct, tag_field="line", tag="trace", frozen=True, kw_only=True):
    """The first line. ``began`` is Unix time in seconds; with ``hashed`` ids of requests are digests."""

    schema: int
    began: Instant = 0.0
    hashed: bool = False
    written_by: TraceName = ""


class EngineLine(msgspec.Struct, tag_field="line", tag="engine", frozen=True, kw_only=True):
    """One generation of an engine, with the number of `WorkerLine` lines that follow; 0: its geometry was not known."""

    engine_id: TraceName
    generation: TraceName
    model: TraceName = ""
    tp: Annotated[int, Meta(ge=1, le=65536)] = 1
    pp: Annotated[int, Meta(ge=1, le=65536)] = 1
    dcp: Annotated[int, Meta(ge=1, le=65536)] = 1
    facts: Annotated[dict[TraceName, str | int | float | bool | None], Meta(max_length=256)] = {}
    workers: Annotated[int, Meta(ge=0, le=65536)] = 0


class WorkerLine(msgspec.Struct, tag_field="line", tag="worker", frozen=True, kw_only=True):
    """One worker of the engine above; ``geometry`` as `kvd.geometry.codec.worker_to_plain` makes it."""

    geometry: dict[str, Any]


class TracedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """One side's blocks of one group: (group, first, runs); runs are (first id, count).

    The first id covers the tokens of the request's block number ``first``.
    """

    group: Annotated[int, Meta(ge=0, le=4096)]
    first: BlockId
    runs: Annotated[tuple[tuple[BlockId, BlockCount], ...], Meta(max_length=MAX_RUNS)]

    @property
    def count(self) -> int:
        """Blocks of all runs."""
        return sum(count for _, count in self.runs)

    def expanded(self) -> BlockList:
        """The ids one by one."""
        parts = [np.arange(start, start + count, dtype=np.int64) for start, count in self.runs]
        return BlockList(self.first, np.concatenate(parts) if parts else np.zeros(0, np.int64))


class TransferLine(msgspec.Struct, tag_field="line", tag="transfer", frozen=True, kw_only=True):
    """One worker's part of moving one request's KV.

    ``local`` and ``remote`` are numbers of engines. ``at`` is when the worker began with it; ``moments`` are seconds
    after that (see `kvd.wire.transfer.TransferRecord`). ``code`` says why it missed. ``cut``: some block lists are
    incomplete, so it cannot be replayed as it was. ``remote_blocks`` is empty where the reading side never learned
    them (pushes that missed).
    """

    transfer: TraceName
    request: TraceName
    local: TraceNumber
    remote: TraceNumber
    local_rank: TraceName
    remote_ranks: Annotated[tuple[TraceName, ...], Meta(max_length=65536)] = ()
    backend: TraceName = ""
    mode: Literal["pull", "push"] = "pull"
    state: Literal["done", "miss"] = "done"
    code: TraceName = ""
    at: Instant = 0.0
    tokens: TraceNumber = 0
    bytes: TraceNumber = 0
    descriptors: TraceNumber = 0
    coalesced_descriptors: TraceNumber = 0
    local_blocks: Annotated[tuple[TracedBlocks, ...], Meta(max_length=4096)] = ()
    remote_blocks: Annotated[tuple[TracedBlocks, ...], Meta(max_length=4096)] = ()
    cut: bool = False
    attempts: TraceNumber = 1
    stages: Annotated[dict[TraceName, Span], Meta(max_length=32)] = {}
    moments: Annotated[dict[TraceName, Moment], Meta(max_length=32)] = {}


class End(msgspec.Struct, tag_field="line", tag="end", frozen=True, kw_only=True):
    """The last line: how many transfers stand above."""

    transfers: TraceNumber


TraceLine: TypeAlias = Header | EngineLine | WorkerLine | TransferLine | End


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """One engine of a trace; ``geometry`` is None where the recording kvd did not know it."""

    line: EngineLine
    geometry: EngineGeometry | None


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A whole trace. ``transfers[i].local`` and ``.remote`` are positions in ``engines``."""

    header: Header
    engines: tuple[TracedEngine, ...]
    transfers: tuple[TransferLine, ...]

    @property
    def geometries(self) -> dict[int, EngineGeometry]:
        """The geometries that are known, by number of the engine."""
        return {
            number: engine.geometry
            for number, engine in enumerate(self.engines)
            if engine.geometry is not None
        }


def obstacles(trace: RecordedTrace) -> Callable[[TransferLine], str]:
    """A function that says why a transfer of the trace cannot be replayed; empty where it can."""
    ranks = {
        number: frozenset(str(worker.rank) for worker in geometry.workers)
        for number, geometry in trace.geometries.items()
    }

    def obstacle(transfer: TransferLine) -> str:
        if transfer.local not in ranks or transfer.remote not in ranks:
            return "of engines whose geometry the recording kvd did not know"
        if transfer.local_rank not in ranks[transfer.local]:
            return "of a rank that the engine does not have"
        if transfer.state != "done":
            return "that missed"
        if not (transfer.local_blocks and transfer.remote_blocks) or transfer.cut:
            return "whose blocks are not recorded in full (very long lists, pushes recorded by an older kvd)"
        return ""

    return obstacle


def block_lists(blocks: Iterable[TracedBlocks]) -> dict[int, BlockList]:
    """One side of a transfer by group, as `kvd.topology.compile.compile_plan` takes it."""
    return {part.group: part.expanded() for part in blocks}
