"""Layer-wise reads: what a prefiller that cannot write here says is readable is read on the ordinary lane.

Each progress message becomes one read from one source, of those tokens of those layers that were not asked for yet. The
lane keeps its rule for these reads as for any other: one that did not complete ends when nothing of it can land.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvd.topology.copies import Copies
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.push import LayerPush, compile_chunk, sendable
from kvd.topology.transfer_topology import RemoteEngine
from kvd.wire.push import LayersThere, PushProgress
from kvd.worker.load import Load, LoadPiece, LoadPieces, LoadTimes
from kvd.worker.orders import block_lists
from kvd.worker.push.arrival import Arrival, Part
from kvd.worker.push.sent_blocks import received_blocks


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
    source = progress.source
    now = time.monotonic()
    rows: list[Descriptors] = []
    reached: dict[Part, int] = {}
    for found in progress.there:
        for layer in found.layers:
            part = (source, layer)
            push = remote.layer_reads(source).get(layer)
            if part not in arrival.left or push is None or found.blocks is None:
                continue
            first = max(arrival.reached.get(part, 0), reached.get(part, 0))
            last = sendable(push, reached=found.tokens, total=arrival.load.order.tokens)
            if last > first:
                rows.append(_chunk(arrival, push, found, first, last))
                reached[part] = last
    if not reached:
        return None
    total = arrival.load.order.tokens
    complete = tuple(part for part, last in reached.items() if last >= total)
    descriptors = concatenate(rows)
    order = arrival.load.order
    position = arrival.plan.remote_ranks.index(source)
    read = Load(
        order=replace(order, groups={}, seconds=0.0),
        times=LoadTimes(now),
        deadline=min(arrival.load.deadline, now + seconds),
        pieces=LoadPieces(arrival.plan, all=[LoadPiece(0, total, {position: Copies(descriptors)})]),
        then=lambda load: ended(load, complete),
    )
    arrival.begin_read(read, reached, len(descriptors))
    return read


def _chunk(arrival: Arrival, push: LayerPush, found: LayersThere, first: int, last: int) -> Descriptors:
    order = arrival.load.order
    blocks = found.blocks
    theirs = {} if blocks is None else {blocks.group: received_blocks(blocks)}
    rows = compile_chunk(push, theirs, block_lists(order.groups), total=order.tokens, first=first, last=last)
    return Descriptors(local=rows.remote, remote=rows.local, length=rows.length)
