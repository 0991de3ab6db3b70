"""Bytes that a load leaves as they were: parts of its own blocks that no copy writes, and that a kernel may read.

Blocks of unequal size are why there are any. Of the last local block only those remote blocks are copied that begin
before the prompt's end, and of the first block of a window those that the remote side still has. Whoever had the block
before may have left anything there: where pages of several groups lie over each other, another layer's floats of
another width. A kernel that masks such a token still multiplies it by zero, and zero times NaN is NaN. So the worker
zeroes these bytes before anything is copied.

What was copied is never leftover, although a page is copied whole and its last tokens may not exist. Those bytes were
in a page of the prefiller's own request. There they are what vLLM gives its kernels to read. Where states or several
precisions share the memory they are zeros, because vLLM zeroes fresh blocks of such models. Elsewhere they are keys and
values that the same layers wrote before, as in an engine that works alone. And where the prefiller's page was itself
filled by a load, its worker has zeroed what that load left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvd.topology.blocks import BlockList, window_start
from kvd.topology.descriptors import Int64
from kvd.topology.pairing import partners, phased
from kvd.topology.plan import Plan
from kvd.topology.reads import Read


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs in a worker's own memory: ``length[i]`` bytes at ``address[i]``.

    Two int64 columns, ordered by address; no two runs touch.
    """

    address: Int64
    length: Int64

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return int(self.length.sum())


NO_RUNS = Runs(np.zeros(0, np.int64), np.zeros(0, np.int64))


def leftover(
    plan: Plan,
    local: Mapping[int, BlockList],
    remote: Mapping[int, BlockList] | None,
    *,
    tokens: int,
    computed: int = 0,
) -> Runs:
    """What `compile_plan` with these arguments does not write of the fields of the ``local`` blocks.

    Without ``remote`` the remote side is taken to have every block that the request needs, and none before its window:
    so it is where the prefiller writes. The first ``computed`` tokens are here already. Where they end inside a block,
    it is a whole one of an earlier request, and the bytes that a remote block shares with them are left as they are. A
    group may have fewer here: then its blocks begin earlier, and all of them are the load's own.

    States are never part of it: their pages are copied whole. Bytes between fields are not either, as nothing reads
    them. Costs some microseconds where nothing is left.
    """
    rows: list[Int64] = []
    lengths: list[Int64] = []
    for read in plan.reads:
        ids = _unwritten(plan, read, local, remote, tokens, computed)
        if ids is not None and len(ids):
            rows.append((read.rows.local[:, None] + ids * read.local_stride).ravel())
            lengths.append(np.repeat(read.rows.length, len(ids)))
    return _joined(np.concatenate(rows), np.concatenate(lengths)) if rows else NO_RUNS


def _unwritten(
    plan: Plan,
    read: Read,
    local: Mapping[int, BlockList],
    remote: Mapping[int, BlockList] | None,
    tokens: int,
    computed: int,
) -> Int64 | None:
    """Ids of the local blocks that meet this read's phase and that it does not write; None where that is plain."""
    blocks = local.get(read.group)
    if read.kind == "mamba" or blocks is None or not len(blocks.ids):
        return None
    size, remote_size = plan.block_sizes[read.group], plan.remote_block_sizes[read.remote_group]
    first, end = blocks.first, blocks.first + len(blocks.ids)
    # Blocks that begin earlier are those of a group that has less here than others: none is an earlier request's.
    here = computed if first >= computed // size else 0
    start = first * size if read.window is None else window_start(read.kind, read.window, tokens)
    if remote is None:
        oldest = max(0, start // remote_size)
    elif read.remote_group in remote:
        oldest = remote[read.remote_group].first
    else:
        return None  # such a load is refused when it is compiled
    if not phased(read) and (end - 1) * size < tokens and first >= min(oldest, start // size):
        return None
    # Only blocks at the two ends can miss anything: what begins before the window, and what reaches past the tokens.
    front = min(end, max(first, -(-start // size)))
    numbers = np.concatenate((np.arange(first, front), np.arange(max(front, tokens // size), end)))
    numbers = numbers[numbers % read.phase.local_period == read.phase.local]
    there, copied = partners(read, size, numbers, oldest, tokens)
    begin = np.maximum(numbers * size, there * remote_size)
    found: Int64 = blocks.ids[numbers[~copied & (begin >= here)] - first]
    return found


def _joined(address: Int64, length: Int64) -> Runs:
    """The same bytes in as few runs as there can be."""
    order = address.argsort(kind="stable")
    address, length = address[order], length[order]
    starts = np.concatenate(([0], np.flatnonzero(address[1:] != address[:-1] + length[:-1]) + 1))
    return Runs(address[starts], np.add.reduceat(length, starts))
