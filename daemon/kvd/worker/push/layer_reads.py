"""Layer-wise reads: what a prefiller that cannot write here says is readable is read on the ordinary lane.

Each progress message becomes one read from one source, of those tokens of those layers that were not asked for yet. The
lane keeps its rule for these reads as for any other: one that did not complete ends when nothing of it can land.

Where a message tells of whole groups, as it does at the end of a step, they are read as a pull reads them: the lane
gets blocks, and nothing is worked out layer by layer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.copies import Copies
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.push import LayerPush, chunk_of_target, compile_chunk, in_window, sendable
from kvd.topology.transfer_topology import RemoteEngine
from kvd.wire.push import PushProgress
from kvd.worker.load import Load, LoadPiece, LoadPieces, LoadTimes
from kvd.worker.orders import block_lists
from kvd.worker.push.arrival import Arrival, Part
from kvd.worker.push.sent_blocks import received_blocks


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens ``first`` to ``last`` of a layer, which lie in these blocks of a ``group`` of the prefiller's."""

    push: LayerPush
    first: int
    last: int
    group: int
    blocks: BlockList

    @property
    def part(self) -> tuple[int, int, int, int, bytes]:
        """What is alike in chunks that are read together."""
        return self.first, self.last, self.group, self.blocks.first, self.blocks.ids.tobytes()


def layer_read(
    arrival: Arrival,
    remote: RemoteEngine,
    progress: PushProgress,
    seconds: float,
    ended: Callable[[Load, tuple[Part, ...]], None],
) -> Load | None:
    """The read of what is readable and was not asked for, in at most so many seconds; None where that is nothing.

    ``ended`` gets it with the parts that it completes, on the lane's thread. Raises `TopologyError` where the blocks do
    not fit.
    """
    source, now = progress.source, time.monotonic()
    chunks = _chunks(arrival, remote, progress)
    if not chunks:
        return None
    order = arrival.load.order
    read = Load(
        order=replace(order, groups={}, seconds=0.0),
        times=LoadTimes(now),
        deadline=min(arrival.load.deadline, now + seconds),
        pieces=_as_blocks(arrival, remote, source, chunks) or _as_rows(arrival, source, chunks),
    )
    reached = {(source, chunk.push.layer): chunk.last for chunk in chunks}
    complete = tuple(part for part, last in reached.items() if last >= order.tokens)
    read.then = lambda load: ended(load, complete)
    arrival.begin_read(read, reached)
    return read


def _chunks(arrival: Arrival, remote: RemoteEngine, progress: PushProgress) -> list[_Chunk]:
    """What is readable and was not asked for; of each layer in the order of its tokens."""
    source, pushes = progress.source, remote.layer_reads(progress.source)
    chunks: list[_Chunk] = []
    reached: dict[str, int] = {}
    for there in progress.there:
        if there.blocks is None:
            continue
        blocks = received_blocks(there.blocks)
        for layer in there.layers:
            push = pushes.get(layer)
            if push is None or (source, layer) not in arrival.left:
                continue
            first = max(arrival.reached.get((source, layer), 0), reached.get(layer, 0))
            last = sendable(push, reached=there.tokens, total=arrival.load.order.tokens)
            if last > first:
                chunks.append(_Chunk(push, first, last, there.blocks.group, blocks))
                reached[layer] = last
    return chunks


def _as_rows(arrival: Arrival, source: Rank, chunks: Sequence[_Chunk]) -> LoadPieces:
    """Each chunk's own descriptors, one after the other."""
    order = arrival.load.order
    local = block_lists(order.groups)
    rows = []
    for chunk in chunks:
        found = compile_chunk(
            chunk.push, {chunk.group: chunk.blocks}, local,
            total=order.tokens, first=chunk.first, last=chunk.last,
        )  # fmt: skip
        rows.append(Descriptors(local=found.remote, remote=found.local, length=found.length))
    copies = {arrival.plan.remote_ranks.index(source): Copies(concatenate(rows))}
    return LoadPieces(arrival.plan, all=[LoadPiece(0, order.tokens, copies)])


def _as_blocks(
    arrival: Arrival, remote: RemoteEngine, source: Rank, chunks: Sequence[_Chunk]
) -> LoadPieces | None:
    """The same tokens of all layers of each group, from the only source; None where there is something else."""
    plan, order = arrival.plan, arrival.load.order
    if {plan.remote_ranks[read.remote] for read in plan.reads} != {source}:
        return None
    layers = Counter(push.group for push in remote.layer_reads(source).values())
    local = block_lists(order.groups)
    mine: dict[int, BlockList] = {}
    theirs: dict[int, BlockList] = {}
    for group, found in groupby(sorted(chunks, key=_group), key=_group):
        first, *others = found
        alike = len({chunk.push.layer for chunk in (first, *others)}) == len(others) + 1 == layers[group]
        if (
            not alike
            or any(other.part != first.part for other in others)
            or first.group != first.push.source_group
            or first.group in theirs  # two groups of ours, with a window each perhaps, in one of theirs
        ):
            return None
        if group in local:
            mine[group] = chunk_of_target(first.push, local[group], first=first.first, last=first.last)
            theirs[first.group] = in_window(first.push, first.blocks, total=order.tokens)
    return LoadPieces(plan, local=mine, remote=theirs, all=[LoadPiece(0, order.tokens)])


def _group(chunk: _Chunk) -> int:
    return chunk.push.group
