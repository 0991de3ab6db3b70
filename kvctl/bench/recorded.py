"""What of a trace can be replayed: requests on compacted blocks, stream by stream.

A stream is what one worker got from one engine, pulled or pushed. Blocks that no transfer of the stream names are left
out of memory; those that lay side by side still do.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvctl.bench.cases import CaseBlocks, MovedRequest
from kvctl.bench.pair import PairScene, scene
from kvctl.errors import CheckFailed
from kvd.geometry.errors import GeometryError
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import Int64
from kvd.topology.errors import TopologyError
from kvd.topology.plan import plan_worker
from kvd.trace.model import RecordedTrace, TransferLine, block_lists, obstacles

MOST_BLOCKS = 8_000_000
"""Blocks of all transfers that are replayed together: their numbers are held in memory, 8 bytes each."""


@dataclass(frozen=True)
class RecordedStream:
    """The transfers of one worker from one engine, oldest first, and the request that each has become."""

    local: str
    rank: str
    remote: str
    mode: Literal["pull", "push"]
    scene: PairScene
    transfers: tuple[TransferLine, ...]
    requests: tuple[MovedRequest, ...]


@dataclass(frozen=True)
class Recorded:
    """All streams of a trace, and how many transfers were left out for which reason."""

    streams: tuple[RecordedStream, ...]
    left_out: dict[str, int]


def recorded(trace: RecordedTrace, limit: int, scale: float) -> Recorded:
    """The first ``limit`` transfers that can be replayed; of long prompts the last part, ``scale`` of their tokens.

    Raises `CheckFailed` where none can, or where there is too much of them.
    """
    left_out: Counter[str] = Counter()
    chosen: dict[tuple[int, str, int, str], list[TransferLine]] = {}
    taken = blocks = 0
    obstacle = obstacles(trace)
    for transfer in sorted(trace.transfers, key=lambda one: one.at):
        if why := obstacle(transfer):
            left_out[why] += 1
        elif taken == limit:
            left_out["more than --limit"] += 1
        else:
            taken += 1
            blocks += sum(part.count for part in (*transfer.local_blocks, *transfer.remote_blocks))
            key = transfer.local, transfer.local_rank, transfer.remote, transfer.mode
            chosen.setdefault(key, []).append(transfer)
    if blocks > MOST_BLOCKS:
        raise CheckFailed(
            f"the transfers name {blocks} blocks; at most {MOST_BLOCKS} are replayed together",
            "give a lower --limit",
        )
    streams = []
    for (local, rank, remote, _), transfers in chosen.items():
        engines = trace.geometries[local], trace.geometries[remote]
        stream = _stream(engines, rank, transfers, scale, left_out)
        if stream is not None:
            streams.append(stream)
    if not streams:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "it has none"
        raise CheckFailed(f"no transfer of the trace can be replayed: {why}", "see kvctl trace show")
    return Recorded(tuple(streams), dict(left_out))


def _stream(
    engines: tuple[EngineGeometry, EngineGeometry],
    rank: str,
    transfers: Sequence[TransferLine],
    scale: float,
    left_out: Counter[str],
) -> RecordedStream | None:
    local, remote = engines
    reader = next(worker for worker in local.workers if str(worker.rank) == rank)
    try:
        plan = plan_worker(reader, local.workers, remote.workers)
    except (TopologyError, GeometryError) as error:
        left_out[f"of engines that do not fit each other ({error})"] += len(transfers)
        return None
    source = remote.workers[plan.sources[0]]
    kept, sides = [], []
    for transfer in transfers:
        pair = block_lists(transfer.local_blocks), block_lists(transfer.remote_blocks)
        if scale < 1:
            pair = _scaled(pair, (reader, source), transfer.tokens, scale)
        try:
            rows = compile_plan(plan, *pair, tokens=transfer.tokens)
        except TopologyError as error:
            left_out[f"whose blocks do not fit ({type(error).__name__})"] += 1
            continue
        if not rows:
            left_out["that move nothing"] += 1
            continue
        kept.append(transfer)
        sides.append(pair)
    if not kept:
        return None
    mine, mine_count = _compacted([pair[0] for pair in sides])
    theirs, their_count = _compacted([pair[1] for pair in sides])
    place = scene(local, remote, (mine_count, their_count), rank)
    requests = tuple(
        MovedRequest(f"{number}", transfer.tokens, mine[number], theirs[number])
        for number, transfer in enumerate(kept)
    )
    return RecordedStream(local.engine_id, rank, remote.engine_id, kept[0].mode, place, tuple(kept), requests)


def _scaled(
    pair: tuple[CaseBlocks, CaseBlocks],
    workers: tuple[WorkerGeometry, WorkerGeometry],
    tokens: int,
    scale: float,
) -> tuple[CaseBlocks, CaseBlocks]:
    """As if the reader had the first tokens already: its full-attention groups lose blocks at the beginning."""
    skip = int(tokens * (1 - scale))
    sizes = [g.block_size for w in workers for g in w.groups if g.kind in ("full", "mla")]
    skip -= skip % max(sizes, default=1)
    cut: list[CaseBlocks] = []
    for blocks, worker in zip(pair, workers, strict=True):
        kinds = {g.index: g for g in worker.groups}
        found = dict(blocks)
        for index, of in blocks.items():
            group = kinds.get(index)
            if group is not None and group.kind in ("full", "mla"):
                gone = min(max(0, skip // group.block_size - of.first), max(0, len(of.ids) - 1))
                found[index] = BlockList(of.first + gone, of.ids[gone:])
        cut.append(found)
    return cut[0], cut[1]


def _compacted(lists: Sequence[CaseBlocks]) -> tuple[list[CaseBlocks], int]:
    """The same lists with small ids, and how many blocks that takes: each gap in use becomes a gap of one block."""
    used = np.unique(np.concatenate([of.ids for blocks in lists for of in blocks.values()]))
    gaps = np.concatenate(([1], np.minimum(np.diff(used), 2)))
    # Never more than it was, so that a worker has as many blocks.
    new: Int64 = np.minimum(np.cumsum(gaps), used)

    def renamed(blocks: CaseBlocks) -> CaseBlocks:
        return {
            index: dataclasses.replace(of, ids=new[np.searchsorted(used, of.ids)])
            for index, of in blocks.items()
        }

    return [renamed(blocks) for blocks in lists], int(new[-1]) + 1


def batches(stream: RecordedStream, most: int, longest: float) -> Iterable[range]:
    """Requests that can be on their way together: no block is filled twice or holds two contents.

    At most ``most`` of them, and begun within ``longest`` seconds of the record.
    """
    begin = 0
    filled: set[int] = set()
    held: set[int] = set()
    for number, request in enumerate(stream.requests):
        mine, theirs = (
            set(np.concatenate([of.ids for of in side.values()]).tolist())
            for side in (request.reader, request.source)
        )
        late = stream.transfers[number].at - stream.transfers[begin].at > longest
        if number > begin and (mine & filled or theirs & held or number - begin == most or late):
            yield range(begin, number)
            begin, filled, held = number, set(), set()
        filled |= mine
        held |= theirs
    if stream.requests:
        yield range(begin, len(stream.requests))
