"""What one request costs between two engines: bytes, descriptors before and after coalescing, balance over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvd.geometry.model import EngineGeometry
from kvd.topology.blocks import BlockList, moved_blocks
from kvd.topology.compat import groups_of
from kvd.topology.compile import compile_plan
from kvd.topology.pairing import read_pairs
from kvd.topology.plan import Plan
from kvd.topology.reads import Read


@dataclass(frozen=True, slots=True)
class RequestCost:
    """One request of ``tokens`` tokens, none of them known to the reading side.

    ``bytes`` are whole blocks, so a little more than the tokens fill. ``descriptors`` are the copies of one page of one
    layer each, ``coalesced_descriptors`` what is left where a request's blocks stand in a row on both sides, which is
    the best case. ``bytes_by_rank`` is what each remote rank sends, ``bytes_by_local_rank`` what each local one takes,
    ``bytes_by_link`` what goes from one to the other, by (local rank, remote rank).
    """

    tokens: int
    bytes: int
    descriptors: int
    coalesced_descriptors: int
    bytes_by_rank: Mapping[str, int]
    bytes_by_local_rank: Mapping[str, int]
    bytes_by_link: Mapping[tuple[str, str], int]

    def seconds(self, bandwidth: float) -> float:
        """Least time at ``bandwidth`` bytes a second of every rank's link: that of the busiest rank of either side."""
        busiest = max([*self.bytes_by_rank.values(), *self.bytes_by_local_rank.values()], default=0)
        return busiest / bandwidth


def request_cost(
    local: EngineGeometry, remote: EngineGeometry, plans: Sequence[Plan], *, tokens: int
) -> RequestCost:
    """Cost of a request, given the plans of all local workers.

    Addresses and block counts of the engines do not matter: a request may be larger than their caches.
    """
    mine, theirs = blocks_of(local, tokens), blocks_of(remote, tokens)
    room = 1 + max([int(b.ids.max(initial=0)) for b in (*mine.values(), *theirs.values())], default=0)
    descriptors = coalesced = 0
    sent = {str(worker.rank): 0 for worker in sorted(remote.workers, key=lambda w: w.rank)}
    taken: dict[str, int] = {}
    links: dict[tuple[str, str], int] = {}
    known: dict[object, tuple[int, int, int] | None] = {}
    by_pattern: dict[int, list[tuple[str, tuple[int, int, int]]]] = {}
    for plan in plans:
        # Where two workers' memory stands decides nothing, only how the reads between them stand to each other.
        if id(plan.pattern) not in by_pattern:
            costs = by_pattern[id(plan.pattern)] = []
            for position, reads in _by_remote(plan).items():
                first = reads[0]
                key = tuple([(id(r.shape), r.here - first.here, r.there - first.there) for r in reads])
                if key not in known:
                    known[key] = _link_cost(plan, reads, mine, theirs, tokens, room)
                if (cost := known[key]) is not None:
                    costs.append((str(plan.remote_ranks[position]), cost))
        here = str(plan.local_rank)
        for there, (size, copies, left) in by_pattern[id(plan.pattern)]:
            sent[there] += size
            taken[here] = taken.get(here, 0) + size
            links[here, there] = size
            descriptors += copies
            coalesced += left
    return RequestCost(
        tokens=tokens,
        bytes=sum(sent.values()),
        descriptors=descriptors,
        coalesced_descriptors=coalesced,
        bytes_by_rank=sent,
        bytes_by_local_rank=taken,
        bytes_by_link=links,
    )


def _by_remote(plan: Plan) -> dict[int, list[Read]]:
    found: dict[int, list[Read]] = {}
    for read in plan.reads:
        found.setdefault(read.remote, []).append(read)
    return found


def _link_cost(
    plan: Plan,
    reads: Sequence[Read],
    local: Mapping[int, BlockList],
    remote: Mapping[int, BlockList],
    tokens: int,
    room: int,
) -> tuple[int, int, int] | None:
    """Bytes, copies, and copies after coalescing of the reads between two workers; None where no block moves."""
    blocks = (room,) * len(plan.remote_blocks)
    alone = replace(plan, reads=tuple(reads), local_blocks=room, remote_blocks=blocks, pattern=object())
    (rows,) = compile_plan(alone, local, remote, tokens=tokens).values() or (None,)
    if rows is None:
        return None
    copies = 0
    for read in reads:
        paired = read_pairs(plan, read, local[read.group], remote[read.remote_group], tokens)[0]
        copies += len(paired) * read.layer_segments * len(read.layers)
    return rows.nbytes, copies, len(rows)


def blocks_of(engine: EngineGeometry, tokens: int) -> dict[int, BlockList]:
    """Blocks of the request in each group, in a row; groups get blocks of their own, since they share one pool."""
    given: dict[int, BlockList] = {}
    free = 1  # block 0 is vLLM's null block
    for index, group in groups_of(engine).items():
        first, count = moved_blocks(group, tokens)
        given[index] = BlockList(first, np.arange(free, free + count, dtype=np.int64))
        free += count
    return given
