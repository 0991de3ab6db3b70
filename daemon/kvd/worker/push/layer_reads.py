"""Layer-wise reads: what a prefiller that cannot write here says is readable is read on the ordinary lane.

Each progress message becomes one read from one source, of those tokens of those layers that were not asked for yet. The
lane keeps its rule for these reads as for any other: one that did not complete ends when nothing of it can land.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.copies import Copies
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.push import LayerPush, compile_chunk, plan_push, sendable
from kvd.wire.push import LayersThere
from kvd.worker.pull.load import Load, Slice
from kvd.worker.push.arrival import Arrival, Part


class Fetching:
    """What is read from one generation of a peer engine.

    ``read`` takes a load and ends it by `Load.then`, on another thread: ``ended`` is called there.
    """

    def __init__(
        self,
        local: WorkerGeometry,
        siblings: Sequence[WorkerGeometry],
        remotes: Sequence[WorkerGeometry],
        read: Callable[[Load], None],
        seconds: float,
    ) -> None:
        self._local, self._siblings, self._remotes = local, siblings, remotes
        self._read = read
        self._seconds = seconds
        self._layers: dict[Rank, dict[str, LayerPush]] = {}

    def fetch(
        self,
        arrival: Arrival,
        source: Rank,
        there: Sequence[LayersThere],
        ended: Callable[[Load, tuple[Part, ...]], None],
    ) -> None:
        """Read what is readable and was not asked for; ``ended`` gets each read with the parts that it completes.

        Raises `TopologyError` where the blocks do not fit.
        """
        now = time.monotonic()
        rows: list[Descriptors] = []
        reached: dict[Part, int] = {}
        for found in there:
            for layer in found.layers:
                part = (source, layer)
                push = self._pushes(source).get(layer)
                if part not in arrival.left or push is None or found.blocks is None:
                    continue
                first = max(arrival.reached.get(part, 0), reached.get(part, 0))
                last = sendable(push, reached=found.tokens, total=arrival.load.order.tokens)
                if last > first:
                    rows.append(_chunk(arrival, push, found, first, last))
                    reached[part] = last
        if not reached:
            return
        arrival.reached.update(reached)
        total = arrival.load.order.tokens
        complete = tuple(part for part, last in reached.items() if last >= total)
        descriptors = concatenate(rows)
        arrival.copies += len(descriptors)
        order = arrival.load.order
        part_load = Load(
            order=replace(order, groups={}, seconds=0.0),
            received=now,
            deadline=min(arrival.load.deadline, now + self._seconds),
            slices=[Slice(0, total, {self._position(source): Copies(descriptors)})],
            plan=arrival.plan,
            then=lambda load: ended(load, complete),
        )
        arrival.reading.add(part_load)
        self._read(part_load)

    def _pushes(self, source: Rank) -> dict[str, LayerPush]:
        if source not in self._layers:
            self._layers[source] = plan_push(self._local, self._siblings, self._remotes, source)
        return self._layers[source]

    def _position(self, source: Rank) -> int:
        return next(i for i, worker in enumerate(self._remotes) if worker.rank == source)


def _chunk(arrival: Arrival, push: LayerPush, found: LayersThere, first: int, last: int) -> Descriptors:
    order = arrival.load.order
    blocks = found.blocks
    theirs = {} if blocks is None else {blocks.group: BlockList(blocks.first, np.array(blocks.ids, np.int64))}
    rows = compile_chunk(push, theirs, order.block_lists(), total=order.tokens, first=first, last=last)
    return Descriptors(local=rows.remote, remote=rows.local, length=rows.length)
