"""Layer-wise reads: what a prefiller that cannot write here says is readable is read on the ordinary lane.

Each progress message becomes one read from one source, of those tokens of those layers that were not asked for yet. The
lane keeps its rule for these reads as for any other: one that did not complete ends when nothing of it can land.

They are read as a pull reads: the lane gets blocks of a plan, and nothing is worked out layer by layer. The layers that
are told together, as at a step's end or at a mark, have a plan of their own that is kept. Where a message tells of
unequal tokens of one group, since the one before was not heard, there is a read for each.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


def layer_reads(
    arrival: Arrival,
    remote: RemoteEngine,
    progress: PushProgress,
    seconds: float,
    ended: Callable[[Load, tuple[Part, ...]], None],
) -> list[Load]:
    """The reads of what is readable and was not asked for, in at most so many seconds.

    ``ended`` gets each with the parts that it completes, on the lane's thread. Raises `TopologyError` where the blocks
    do not fit.
    """
    source, now, order = progress.source, time.monotonic(), arrival.load.order
    reads: list[tuple[Load, dict[Part, int]]] = []
    for chunks in _together(_chunks(arrival, remote, progress)):
        read = Load(
            order=replace(order, groups={}, seconds=0.0),
            times=LoadTimes(now),
            deadline=min(arrival.load.deadline, now + seconds),
            pieces=_as_blocks(arrival, remote, source, chunks) or _as_rows(arrival, source, chunks),
        )
        reached = {(source, chunk.push.layer): chunk.last for chunk in chunks}
        complete = tuple(part for part, last in reached.items() if last >= order.tokens)
        read.then = functools.partial(_ended, ended, complete)
        reads.append((read, reached))
    for read, reached in reads:  # all or none of them
        arrival.begin_read(read, reached)
    return [read for read, _ in reads]


def _ended(ended: Callable[[Load, tuple[Part, ...]], None], complete: tuple[Part, ...], load: Load) -> None:
    ended(load, complete)


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


def _together(chunks: Sequence[_Chunk]) -> list[list[_Chunk]]:
    """What one read each can take: of a group the same tokens in the same blocks."""
    alike: dict[tuple[int, int, int, int], list[_Chunk]] = {}
    for chunk in chunks:
        alike.setdefault((chunk.push.group, chunk.first, chunk.last, id(chunk.blocks)), []).append(chunk)
    reads: list[list[_Chunk]] = []
    taken: list[set[tuple[str, int]]] = []
    for found in alike.values():
        # Two groups of ours, with a window each perhaps, may lie in one of theirs.
        groups = {("ours", found[0].push.group), ("theirs", found[0].group)}
        place = next((i for i, others in enumerate(taken) if not groups & others), len(reads))
        if place == len(reads):
            reads.append([])
            taken.append(set())
        reads[place] += found
        taken[place] |= groups
    return reads


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
    """The same as blocks of a plan for these layers; None where none is kept for them."""
    plan = remote.part(source, frozenset(chunk.push.layer for chunk in chunks))
    if plan is None or any(chunk.group != chunk.push.source_group for chunk in chunks):
        return None
    order = arrival.load.order
    local = block_lists(order.groups)
    mine: dict[int, BlockList] = {}
    theirs: dict[int, BlockList] = {}
    for one in {chunk.push.group: chunk for chunk in chunks}.values():
        group = one.push.group
        if group in local:
            mine[group] = chunk_of_target(one.push, local[group], first=one.first, last=one.last)
            theirs[one.group] = in_window(one.push, one.blocks, total=order.tokens)
    return LoadPieces(plan, local=mine, remote=theirs, all=[LoadPiece(0, order.tokens)])
