"""Plan a local worker against a remote engine; compile a plan for block ids.

A plan is made once for a pair and holds absolute addresses of block 0 and strides. Compiling it for a request is an
outer sum in numpy: blocks times rows, without a Python loop over either, with runs of adjacent blocks found before they
are multiplied by layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.model import Group, GroupKind, Layer, Page, Rank, WorkerGeometry
from kvd.topology.descriptors import Descriptors, Int64, coalesce, concatenate
from kvd.topology.errors import BlockMismatch, LayerMissing
from kvd.topology.grid import Grid, Int32
from kvd.topology.intersect import Table, join
from kvd.topology.sources import Holder, Phase, Piece, pieces

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Read:
    """What one remote worker supplies of one group, for all layers that it supplies in the same way.

    ``rows`` are runs at absolute addresses for block 0 on both sides, over all ``layers``; block ``b`` adds
    ``b * stride``. ``layer_bytes`` and ``layer_segments`` are of one page of one layer. ``heads`` are the first and one
    past the last of the model's heads, ``window`` is the local group's sliding window or chunk in tokens.
    """

    remote: int
    group: int
    remote_group: int
    kind: GroupKind
    phase: Phase
    layers: tuple[str, ...]
    rows: Table
    local_stride: int
    remote_stride: int
    layer_bytes: int
    layer_segments: int
    heads: tuple[int, int] | None
    window: int | None = None

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes that this read takes from one block, over all its layers."""
        return self.rows.nbytes

    @cached_property
    def filling(self) -> tuple[Mask, int]:
        """Which rows fill their stride on both sides, so that they go on in the next block, and how many do."""
        rows = self.rows
        mask: Mask = (rows.length == self.local_stride) & (rows.length == self.remote_stride)
        return mask, int(np.count_nonzero(mask))


class Cells(NamedTuple):
    """Of a read's rows in its grid: the cell of block 0 on both sides, two columns of shape (rows, 1)."""

    local: Int32
    remote: Int32


@dataclass(frozen=True)
class Plan:
    """All reads of one local worker from one remote engine. ``remote_ranks[read.remote]`` is whom to read from."""

    local_rank: Rank
    remote_ranks: tuple[Rank, ...]
    reads: tuple[Read, ...]
    block_sizes: tuple[int, ...]
    remote_block_sizes: tuple[int, ...]
    local_blocks: int
    remote_blocks: tuple[int, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        """Positions of the remote workers that are read from, in order."""
        return tuple(sorted({read.remote for read in self.reads}))

    @cached_property
    def grids(self) -> dict[int, tuple[Grid, dict[int, Cells]]]:
        """By position of the remote worker: its reads as one grid, and the cells of each read (by its id)."""
        return {position: self._grid(position) for position in self.sources}

    def _grid(self, position: int) -> tuple[Grid, dict[int, Cells]]:
        reads = [read for read in self.reads if read.remote == position]
        counts = [len(read.rows) for read in reads]
        grid = Grid(
            np.concatenate([read.rows.local for read in reads]),
            np.concatenate([read.rows.remote for read in reads]),
            np.concatenate([read.rows.length for read in reads]),
            np.repeat(np.array([read.local_stride for read in reads], np.int64), counts),
            np.repeat(np.array([read.remote_stride for read in reads], np.int64), counts),
            self.local_blocks,
            self.remote_blocks[position],
        )
        ends = np.cumsum(counts).tolist()
        cells = {}
        for read, end, count in zip(reads, ends, counts, strict=True):
            # 32 bits hold the cells of every grid that is picked from (`Grid.numbered`).
            row = np.arange(end - count, end, dtype=np.int64)[:, None]
            cells[id(read)] = Cells(
                (row * grid.local_blocks).astype(np.int32), (row * grid.remote_blocks).astype(np.int32)
            )
        return grid, cells


@dataclass(frozen=True, slots=True)
class BlockList:
    """One request's blocks of one group: ``ids[i]`` covers the tokens of the request's block number ``first + i``.

    For a state group ``first`` has no meaning: ids are matched one to one.
    """

    first: int
    ids: Int64


def plan_worker(
    local: WorkerGeometry, peers: Sequence[WorkerGeometry], remotes: Sequence[WorkerGeometry]
) -> Plan:
    """The plan for ``local`` to read all its layers from the workers of a remote engine.

    ``peers`` are all workers of the local engine, ``local`` among them: replicas share the work. Layers are matched by
    name. Raises `LayerMissing`, `FieldMismatch`, `NotCovered` or `BlockMismatch`.
    """
    found = _found(local, peers, remotes)
    return _plan(local, remotes, [_read(local, remotes, alike, parts) for alike, parts in found.items()])


def plan_layers(
    local: WorkerGeometry, peers: Sequence[WorkerGeometry], remotes: Sequence[WorkerGeometry]
) -> dict[str, Plan]:
    """`plan_worker` layer by layer: a plan for each, which together read the same bytes from the same workers.

    A layer that reuses another's cache has none: its bytes move with the other's.
    """
    reads: dict[str, list[Read]] = {}
    for alike, parts in _found(local, peers, remotes).items():
        for part in parts:
            reads.setdefault(part[0].name, []).append(_read(local, remotes, alike, [part]))
    return {name: _plan(local, remotes, reads[name]) for name in local.layers if name in reads}


def compile_plan(
    plan: Plan, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], *, tokens: int
) -> dict[int, Descriptors]:
    """Descriptors for one request, coalesced, by position of the remote worker.

    ``local`` and ``remote`` give the blocks of each group by group index; groups that ``local`` leaves out are not
    read. ``tokens`` is how many tokens of the request the remote side has: blocks that begin after them are left alone.
    Of a windowed group the remote blocks before the window may be missing. Raises `BlockMismatch` where a needed remote
    block is not given, an id is out of range or a local id is given twice.
    """
    parts: dict[int, list[Descriptors]] = {}
    split: dict[int, list[Descriptors]] = {}
    for met in meetings(plan, local, remote, tokens):
        (split if phased(met.read) else parts).setdefault(met.read.remote, []).append(coalesced(met))
    for position, found in split.items():
        parts.setdefault(position, []).append(coalesce(concatenate(found)))
    return {position: concatenate(found) for position, found in parts.items()}


@dataclass(frozen=True, eq=False)
class Met:
    """The blocks of one request that meet in one read: ids of local and remote blocks, two columns of one length.

    They are in the order of local ids, whatever order they were given in: runs are then found wherever there are any.
    """

    read: Read
    mine: Int64
    theirs: Int64

    @cached_property
    def breaks(self) -> Mask:
        """Between which two neighbours one run ends and the next begins; in a run both sides count up together."""
        gaps: Mask = (self.mine[1:] - self.mine[:-1] != 1) | (self.theirs[1:] - self.theirs[:-1] != 1)
        return gaps


def meetings(
    plan: Plan, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], tokens: int
) -> Iterator[Met]:
    """Each read of the plan with the blocks that it copies for a request. Raises as `compile_plan`."""
    for index, blocks in local.items():
        _distinct(index, blocks)
    for read in plan.reads:
        if read.group not in local:
            continue
        if read.remote_group not in remote:
            raise BlockMismatch(
                f"no blocks given for remote group {read.remote_group}, which group {read.group} reads from"
            )
        mine, theirs = block_pairs(plan, read, local[read.group], remote[read.remote_group], tokens)
        if not len(mine):
            continue
        if not _ascending(mine):
            order = mine.argsort()
            mine, theirs = mine[order], theirs[order]
        _in_range(int(mine[0]), int(mine[-1]), plan.local_blocks, f"local group {read.group}")
        _in_range(
            int(theirs.min()),
            int(theirs.max()),
            plan.remote_blocks[read.remote],
            f"remote group {read.remote_group}",
        )
        yield Met(read, mine, theirs)


def phased(read: Read) -> bool:
    """Whether blocks of different sizes meet: what one phase reads may then continue in the next."""
    return read.phase.local_period > 1 or read.phase.remote_period > 1


class _Alike(NamedTuple):
    """What the layers of one read have in common; ``piece`` is the identity of the piece (its rank and phase)."""

    group: int
    remote_group: int
    local_stride: int
    remote_stride: int
    piece: int


_Memory = dict[object, tuple[int, dict[int, list[Piece]]]]
"""For pages that meet in the same way: after how many turns the rotation repeats, and the pieces of each turn."""


_Parts = list[tuple[Layer, Layer, Piece]]


def _found(
    local: WorkerGeometry, peers: Sequence[WorkerGeometry], remotes: Sequence[WorkerGeometry]
) -> dict[_Alike, _Parts]:
    """Which piece of which remote layer belongs in which local layer, by what makes layers one read."""
    memory: _Memory = {}
    found: dict[_Alike, _Parts] = {}
    turn = 0
    for group in local.groups:
        placed: set[tuple[int, int, int]] = set()
        for layer in group.layers:
            # Layers that reuse another layer's cache stand at the same address: their bytes move once.
            place = (layer.region, layer.offset, layer.stride)
            if place in placed:
                continue
            placed.add(place)
            for piece, remote_group, remote_layer in _sources(
                layer, group, local, peers, remotes, turn, memory
            ):
                alike = _Alike(group.index, remote_group.index, layer.stride, remote_layer.stride, id(piece))
                found.setdefault(alike, []).append((layer, remote_layer, piece))
            turn += 1
    return found


def _plan(local: WorkerGeometry, remotes: Sequence[WorkerGeometry], reads: Sequence[Read]) -> Plan:
    return Plan(
        local_rank=local.rank,
        remote_ranks=tuple(w.rank for w in remotes),
        reads=tuple(reads),
        block_sizes=tuple(g.block_size for g in local.groups),
        remote_block_sizes=_block_sizes(remotes),
        local_blocks=local.num_blocks,
        remote_blocks=tuple(w.num_blocks for w in remotes),
    )


def _block_sizes(remotes: Sequence[WorkerGeometry]) -> tuple[int, ...]:
    """Block sizes by group of a remote engine. Raises `BlockMismatch` where its workers disagree."""
    sizes: dict[int, tuple[int, Rank]] = {}
    for worker in remotes:
        for group in worker.groups:
            size, rank = sizes.setdefault(group.index, (group.block_size, worker.rank))
            if size != group.block_size:
                raise BlockMismatch(
                    f"remote group {group.index} has blocks of {size} tokens on {rank}"
                    f" and of {group.block_size} on {worker.rank}"
                )
    return tuple(sizes[index][0] for index in sorted(sizes))


def _distinct(index: int, blocks: BlockList) -> None:
    """Raise `BlockMismatch` where a block would be written twice."""
    if _ascending(blocks.ids):
        return
    ids = np.sort(blocks.ids)
    same = ids[1:] == ids[:-1]
    if same.any():
        twice = ids[1:][same][0]
        times = int(np.count_nonzero(ids == twice))
        raise BlockMismatch(f"local group {index}: block id {int(twice)} is given {times} times")


def _ascending(ids: Int64) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _sources(
    layer: Layer,
    group: Group,
    local: WorkerGeometry,
    peers: Sequence[WorkerGeometry],
    remotes: Sequence[WorkerGeometry],
    turn: int,
    memory: _Memory,
) -> list[tuple[Piece, Group, Layer]]:
    having = [(i, *w.layers[layer.name]) for i, w in enumerate(remotes) if layer.name in w.layers]
    if not having:
        raise LayerMissing(
            f"layer {layer.name} (group {group.index}) is on none of {len(remotes)} remote workers"
        )
    for _, remote_group, _ in having:
        if (remote_group.kind == "mamba") != (group.kind == "mamba"):
            raise LayerMissing(
                f"layer {layer.name} is of kind {group.kind} here and {remote_group.kind} there"
            )
    holders = tuple(
        Holder(i, remote_layer.page, remote_group.block_size) for i, remote_group, remote_layer in having
    )
    sharing = [w for w in peers if layer.name in w.layers]
    sharers: tuple[Page, ...] = tuple(w.layers[layer.name][1].page for w in sharing)
    me = next((i for i, w in enumerate(sharing) if w.rank == local.rank), 0)
    key = (group.kind, group.block_size, layer.page, holders, sharers, me)
    # One look-up a layer: comparing keys of many pages is a good part of the time that planning takes.
    known = memory.get(key)
    if known is None or turn % known[0] not in known[1]:
        period, made = pieces(group, layer.page, holders, sharers or (layer.page,), me, turn)
        known = memory.setdefault(key, (period, {}))
        known[1][turn % period] = made
    period, by_turn = known
    by_remote = {i: (remote_group, remote_layer) for i, remote_group, remote_layer in having}
    return [(piece, *by_remote[piece.remote]) for piece in by_turn[turn % period]]


def _read(
    local: WorkerGeometry,
    remotes: Sequence[WorkerGeometry],
    alike: _Alike,
    parts: _Parts,
) -> Read:
    group, piece = local.groups[alike.group], parts[0][2]
    here = np.array([local.page_address(layer) for layer, _, _ in parts], np.int64)
    there = np.array([remotes[piece.remote].page_address(layer) for _, layer, _ in parts], np.int64)
    table = piece.table
    rows = join(
        Table(
            (here[:, None] + table.local).ravel(),
            (there[:, None] + table.remote).ravel(),
            np.broadcast_to(table.length, (len(parts), len(table))).ravel(),
        )
    )
    return Read(
        remote=piece.remote,
        group=group.index,
        remote_group=alike.remote_group,
        kind=group.kind,
        phase=piece.phase,
        layers=tuple(layer.name for layer, _, _ in parts),
        rows=rows,
        local_stride=alike.local_stride,
        remote_stride=alike.remote_stride,
        layer_bytes=table.nbytes,
        layer_segments=len(table),
        heads=piece.heads,
        window=group.window,
    )


def block_pairs(
    plan: Plan, read: Read, local: BlockList, remote: BlockList, tokens: int
) -> tuple[Int64, Int64]:
    """Ids of the local and remote blocks that meet in this read, two columns of one length.

    Raises `BlockMismatch` where a remote block that is needed is not among ``remote``.
    """
    if read.kind == "mamba":
        if len(local.ids) != len(remote.ids):
            raise BlockMismatch(
                f"state group {read.group}: {len(local.ids)} local blocks and {len(remote.ids)} remote ones"
            )
        return local.ids, remote.ids
    phase, size = read.phase, plan.block_sizes[read.group]
    if phase.local_period == phase.remote_period == 1:
        return _equal_blocks(read, size, local, remote, tokens)
    remote_size = size * phase.local_period // phase.remote_period
    numbers = local.first + np.arange(len(local.ids), dtype=np.int64)
    here = numbers % phase.local_period == phase.local
    there = (numbers // phase.local_period) * phase.remote_period + phase.remote
    # The tokens that this local block and that remote block share begin at the later of the two blocks.
    needed = here & (np.maximum(numbers * size, there * remote_size) < tokens)
    if read.window is not None:
        # The remote side let go of blocks before the window; they are missed only where the window needs them.
        end = np.minimum((numbers + 1) * size, (there + 1) * remote_size)
        needed &= (there >= remote.first) | (end > window_start(read.kind, read.window, tokens))
    there, ids = there[needed], local.ids[needed]
    if len(there):
        _given(read, int(there[0]), int(there[-1]), remote, remote_size)
    return ids, remote.ids[there - remote.first]


def _equal_blocks(
    read: Read, size: int, local: BlockList, remote: BlockList, tokens: int
) -> tuple[Int64, Int64]:
    """`block_pairs` where blocks meet one to one: both columns are slices."""
    first, last = local.first, min(local.first + len(local.ids), -(-tokens // size))
    if read.window is not None:
        first = max(first, min(remote.first, window_start(read.kind, read.window, tokens) // size))
    if first >= last:
        return local.ids[:0], remote.ids[:0]
    _given(read, first, last - 1, remote, size)
    return local.ids[first - local.first : last - local.first], remote.ids[
        first - remote.first : last - remote.first
    ]


def _given(read: Read, first: int, last: int, remote: BlockList, size: int) -> None:
    """Raise `BlockMismatch` unless the remote blocks ``first`` to ``last`` of ``size`` tokens are among those given."""
    end = remote.first + len(remote.ids)
    if first < remote.first or last >= end:
        raise BlockMismatch(
            f"group {read.group} needs the request's remote blocks {first}..{last} of {size} tokens,"
            f" and {remote.first}..{end - 1} were given"
        )


def window_start(kind: GroupKind, window: int, tokens: int) -> int:
    """First token that a query at position ``tokens - 1`` or later attends to.

    A request whose every token is known computes its last one again, so that is the earliest query there can be.
    """
    if kind == "chunked":
        return (tokens - 1) // window * window
    return tokens - window


def _in_range(least: int, most: int, blocks: int, what: str) -> None:
    if least < 0 or most >= blocks:
        raise BlockMismatch(f"{what}: block ids {least}..{most} and only {blocks} blocks")


def coalesced(met: Met) -> Descriptors:
    """Outer sum of blocks and rows. Rows that fill their stride on both sides continue from block to block."""
    read, mine, theirs = met.read, met.mine, met.theirs
    whole, count = read.filling
    parts = []
    if count:
        starts = np.concatenate(([0], met.breaks.nonzero()[0] + 1))
        run = np.diff(starts, append=len(mine))
        parts.append(_outer(read, whole, mine[starts], theirs[starts], run))
    if count < len(whole):
        parts.append(_outer(read, ~whole, mine, theirs, np.ones(len(mine), np.int64)))
    return concatenate(parts)


def left_over(met: Met) -> int:
    """How many descriptors `coalesced` gives."""
    whole, rows = met.read.filling[1], len(met.read.rows)
    return whole * (1 + int(np.count_nonzero(met.breaks))) + (rows - whole) * len(met.mine)


def _outer(
    read: Read,
    which: Mask,
    mine: Int64,
    theirs: Int64,
    blocks: Int64,
) -> Descriptors:
    rows = read.rows
    return Descriptors(
        (rows.local[which][:, None] + mine * read.local_stride).ravel(),
        (rows.remote[which][:, None] + theirs * read.remote_stride).ravel(),
        (rows.length[which][:, None] * blocks).ravel(),
    )
