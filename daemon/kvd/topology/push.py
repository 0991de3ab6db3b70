"""What one prefilling worker writes to one decoding worker, layer by layer and as far as it is computed.

Push moves exactly the bytes that pull would. The plan is the decoding worker's own, cut by layer and to one source. A
chunk of it is compiled for the decoder's blocks that begin in the chunk, with both sides exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList, window_start
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.errors import UnknownEngine
from kvd.topology.plan import Plan, plan_layers


@dataclass(frozen=True, slots=True)
class LayerPush:
    """What one prefilling worker supplies of one layer of one decoding worker.

    ``group`` is the decoder's group of the layer, ``source_group`` the prefiller's. Chunks end at multiples of ``unit``
    tokens, where blocks of both sides end; it is 0 for a state, which is sent whole when the prompt is done. ``plan``
    is the decoding worker's plan of this layer from this source.
    """

    layer: str
    group: int
    source_group: int
    unit: int
    plan: Plan


def plan_push(
    target: WorkerGeometry,
    targets: Sequence[WorkerGeometry],
    sources: Sequence[WorkerGeometry],
    source: Rank,
) -> dict[str, LayerPush]:
    """What worker ``source`` of the prefilling engine writes to ``target``, by layer; nothing where others supply it.

    ``targets`` are all workers of their engine; of ``sources`` those of the same pipeline stage are enough. Raises what
    `plan_worker` raises, of the layers of ``source``, and `UnknownEngine` where there is no such worker among them.
    """
    position = next((i for i, worker in enumerate(sources) if worker.rank == source), None)
    if position is None:
        raise UnknownEngine(f"no worker {source} among the {len(sources)} of the prefilling engine")
    pushes: dict[str, LayerPush] = {}
    supplied = plan_layers(target, targets, sources, sources[position].layers, position)
    for layer, plan in supplied.items():
        first = plan.reads[0]
        unit = lcm(plan.block_sizes[first.group], plan.remote_block_sizes[first.remote_group])
        pushes[layer] = LayerPush(
            layer,
            first.group,
            first.remote_group,
            0 if first.kind == "mamba" else unit,
            plan,
        )
    return pushes


def sendable(push: LayerPush, *, reached: int, total: int) -> int:
    """Up to which of ``total`` tokens a layer can be sent that holds KV of ``reached``.

    Whole units before the end, so that no block is sent that is not full yet; a state at the end only.
    """
    if reached >= total:
        return total
    return reached // push.unit * push.unit if push.unit else 0


def compile_chunk(
    push: LayerPush,
    source: Mapping[int, BlockList],
    target: Mapping[int, BlockList],
    *,
    total: int,
    first: int,
    last: int,
) -> Descriptors:
    """What to write of tokens ``first`` to ``last``; ``local`` is the source, to be submitted as a write.

    Both are what `sendable` gave, or 0. ``source`` and ``target`` are the blocks of both sides by their own groups;
    the source's need not go beyond ``last``. Blocks of a windowed group that no query after the prompt attends to are
    left out. Raises `BlockMismatch` where a needed block is not given or an id is out of range.
    """
    if push.group not in target or first >= last or (not push.unit and last < total):
        return concatenate([])
    theirs = chunk_of_target(push, target[push.group], first=first, last=last)
    if not len(theirs.ids):
        return concatenate([])
    mine = {index: in_window(push, blocks, total=total) for index, blocks in source.items()}
    found = compile_plan(push.plan, {push.group: theirs}, mine, tokens=total)
    rows = concatenate(list(found.values()))
    return Descriptors(local=rows.remote, remote=rows.local, length=rows.length)


def chunk_of_target(push: LayerPush, blocks: BlockList, *, first: int, last: int) -> BlockList:
    """The decoder's blocks that begin at tokens ``first`` to ``last``; all of a state."""
    if not push.unit:
        return blocks
    size = push.plan.block_sizes[push.group]
    low = max(blocks.first, -(-first // size))
    high = max(low, -(-last // size))
    return BlockList(low, blocks.ids[low - blocks.first : high - blocks.first])


def in_window(push: LayerPush, blocks: BlockList, *, total: int) -> BlockList:
    """The prefiller's blocks without those that left the window of the whole prompt."""
    read = push.plan.reads[0]
    if read.window is None:
        return blocks
    size = push.plan.remote_block_sizes[push.source_group]
    low = max(blocks.first, window_start(read.kind, read.window, total) // size)
    return BlockList(low, blocks.ids[low - blocks.first :])
