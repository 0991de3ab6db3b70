"""A large load in a few pieces, one behind the other in the prompt.

The bytes of one move while the next is planned, and a miss need not lose what came before it.
Pieces end where blocks of both sides end in every group. States belong to the last piece: a state is worth something
only where the whole prompt is.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from kvd.topology.blocks import BlockList, window_start
from kvd.topology.plan import Plan
from kvd.topology.reads import Read

LEAST_BYTES = 64 << 20
"""For so many there is a piece, where nothing else is said: it costs about 0.2 ms of planning, and 64 MiB take over
1 ms at 50 GB/s."""
MOST = 8
"""Pieces of a load at most."""


def cut(plan: Plan, local: Mapping[int, BlockList], *, tokens: int, least: int = LEAST_BYTES) -> list[int]:
    """Where the pieces of a load of ``local`` blocks end, in tokens of the prompt; the last one at ``tokens``.

    There are as many as ``least`` bytes fit into the load. The first is half as long as the others, since nothing moves
    until it is planned.
    """
    reads = [read for read in plan.reads if _filled(read, local)]
    count = min(MOST, sum(_bytes(read, local) for read in reads) // least)
    covering = [read for read in reads if read.kind != "mamba"]
    if count < 2 or not covering:
        return [tokens]
    unit = _unit(plan, covering)
    first = min(local[read.group].first * plan.block_sizes[read.group] for read in covering) // unit
    units = -(-tokens // unit) - first
    halves = 2 * count - 1
    ends = {(first + -(-units * half // halves)) * unit for half in range(1, halves, 2)}
    return [end for end in sorted(ends) if first * unit < end < tokens] + [tokens]


def piece(
    plan: Plan, local: Mapping[int, BlockList], *, begin: int, end: int, tokens: int
) -> dict[int, BlockList]:
    """The blocks of one piece, tokens ``begin`` to ``end``; ``begin`` is 0 or where the piece before it ends."""
    states = {read.group for read in plan.reads if read.kind == "mamba"}
    found = {}
    for group, blocks in local.items():
        if group in states:
            if end == tokens:
                found[group] = blocks
            continue
        size = plan.block_sizes[group]
        low, high = (max(0, -(-at // size) - blocks.first) for at in (begin, end))
        found[group] = BlockList(blocks.first + low, blocks.ids[low:high])
    return found


def largest_prefix(plan: Plan, remote: Mapping[int, BlockList], *, good: int, tokens: int) -> int:
    """The longest prefix that may be claimed after a claim of ``tokens`` missed and ``good`` tokens had come; or 0.

    It is shorter than the claim and ends where blocks end in every group. A state fits ``tokens`` only. A shorter
    prefix ends in an earlier window, whose blocks the prefiller (``remote``) must still offer.
    """
    if any(read.kind == "mamba" for read in plan.reads) or not plan.reads:
        return 0
    unit = _unit(plan, plan.reads)
    prefix = min(good, tokens - 1) // unit * unit
    for read in plan.reads:
        if read.window is not None and read.remote_group in remote:
            offered = remote[read.remote_group].first * plan.remote_block_sizes[read.remote_group]
            if offered > max(0, window_start(read.kind, read.window, prefix)):
                return 0
    return max(0, prefix)


def _unit(plan: Plan, reads: list[Read] | tuple[Read, ...]) -> int:
    return lcm(*(lcm(plan.block_sizes[r.group], plan.remote_block_sizes[r.remote_group]) for r in reads))


def _filled(read: Read, local: Mapping[int, BlockList]) -> bool:
    return read.group in local and len(local[read.group].ids) > 0


def _bytes(read: Read, local: Mapping[int, BlockList]) -> int:
    return read.bytes_per_block * -(-len(local[read.group].ids) // read.phase.local_period)
