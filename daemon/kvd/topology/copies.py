"""What one request copies: descriptors where its blocks lie together, a selection of a grid where they do not.

Coalesced descriptors are fewest, but a backend must check each one's address and prepare it for the post. Cells of a
grid were checked when the grid was prepared; a pick costs a fraction of a descriptor's time, but there is one for each
block. `LEAST_RUN` is where the two meet, and below `FEW` cells a selection costs least whatever the runs, as nothing
need be joined (docs/geometry.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvd.topology.blocks import BlockList
from kvd.topology.columns import column_of, narrow
from kvd.topology.compile import coalesced, left_over
from kvd.topology.descriptors import Descriptors, coalesce, concatenate
from kvd.topology.grid import BlockSelection, Cells, GivenBlocks, Grid, Int32, RowBlocks, Selection
from kvd.topology.pairing import PairedBlocks, check_distinct, in_order, pair_blocks, phased
from kvd.topology.plan import Plan
from kvd.topology.reads import Read

LEAST_RUN = 6
"""Blocks that a descriptor must join on average to be worth more than a selection."""
FEW = 4096
"""Cells so few that joining them takes longer than it saves. Backends that take them join neighbours themselves."""


@dataclass(slots=True)
class Copies:
    """What is to be copied from (or to) one remote worker; ``picked`` is what ``selection`` stands for.

    What `straight_copies` gave is the blocks of each read, as ``given``.
    """

    descriptors: Descriptors = field(default_factory=lambda: concatenate([]))
    selection: Selection | BlockSelection | None = None
    picked: Sequence[PairedBlocks] = ()
    given: Sequence[tuple[Read, GivenBlocks]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.descriptors.nbytes + (self.selection.nbytes if self.selection else 0)

    @property
    def runs(self) -> int:
        """Descriptors after coalescing, whether they were made or not. Takes as long as a plan: ask after the post."""
        given = [
            PairedBlocks(read, blocks.mine.astype(np.int64), blocks.theirs.astype(np.int64))
            for read, blocks in self.given
        ]
        picked = [*self.picked, *given]
        split = [paired for paired in picked if phased(paired.read)]
        straight = sum(left_over(in_order(paired)) for paired in picked if not phased(paired.read))
        return len(self.descriptors) + straight + (len(_joined(split)) if split else 0)


def compile_request(
    plan: Plan, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], *, tokens: int
) -> dict[int, Copies]:
    """The copies of one request by position of the remote worker; arguments and errors as of `compile_plan`."""
    found: dict[int, tuple[list[PairedBlocks], list[PairedBlocks]]] = {}
    for paired in pair_blocks(plan, local, remote, tokens):
        found.setdefault(paired.read.remote, ([], []))[phased(paired.read)].append(paired)
    return {
        position: _copies(plan.grids[position], straight, split)
        for position, (straight, split) in found.items()
    }


def compile_blocks(
    plan: Plan, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], *, tokens: int
) -> dict[int, Copies]:
    """The copies of one request as blocks of a grid, for a lane that works with those: nothing is multiplied by rows.

    Arguments and errors as of `compile_plan`. Where a grid's cells cannot be numbered it is `compile_request`, as no
    other lane could take over what is copied.
    """
    if not plan.numbered:
        return compile_request(plan, local, remote, tokens=tokens)
    found: dict[int, list[PairedBlocks]] = {}
    for paired in pair_blocks(plan, local, remote, tokens, ordered=False):
        found.setdefault(paired.read.remote, []).append(paired)
    copies = {}
    for position, picked in found.items():
        grid, cells = plan.grids[position]
        parts = tuple(
            RowBlocks(
                cells[id(paired.read)].first_row,
                len(paired.read.rows),
                narrow(paired.mine),
                narrow(paired.theirs),
            )
            for paired in picked
        )
        nbytes = sum(paired.read.bytes_per_block * len(paired.mine) for paired in picked)
        copies[position] = Copies(selection=BlockSelection(grid, parts, nbytes, inside=True), picked=picked)
    return copies


def straight_copies(
    plan: Plan,
    local: Mapping[int, tuple[int, tuple[int, ...]]],
    remote: tuple[Sequence[int], Sequence[tuple[int, ...]]],
    *,
    tokens: int,
    most_bytes: int,
) -> dict[int, Copies] | None:
    """As `compile_blocks`, of less than ``most_bytes`` and where blocks meet one to one in all reads from one worker.

    ``local`` are (first, ids) by group, ``remote`` the firsts and the ids of all groups. None where the plan or the
    request is not that simple, or where something is wrong with it: who compiles it otherwise will say what. Whether an
    id is given twice is not looked at, see `check_given`.

    All local blocks are written whole: nothing of them is left over (`kvd.topology.leftover`). A thread that slept has
    none of its code in the processor's caches, where each library that planning calls costs ten times what it costs in
    a loop. So this makes no column.
    """
    if not plan.straight or local.keys() != {read.group for read in plan.straight}:
        return None
    grid, cells = plan.grids[plan.straight[0].remote]
    given: list[tuple[Read, GivenBlocks]] = []
    nbytes = 0
    for read in plan.straight:
        pair = _paired_ids(plan, read, local[read.group], remote, tokens)
        if pair is None or not (
            _all_below(pair[0], grid.local_blocks) and _all_below(pair[1], grid.remote_blocks)
        ):
            return None
        nbytes += len(pair[0]) * read.bytes_per_block
        given.append((read, GivenBlocks(cells[id(read)].first_row, len(read.rows), *pair)))
    if nbytes >= most_bytes:
        return None
    selection = BlockSelection(grid, tuple(blocks for _, blocks in given), nbytes, inside=True)
    return {plan.straight[0].remote: Copies(selection=selection, given=given)}


def _paired_ids(
    plan: Plan,
    read: Read,
    local: tuple[int, tuple[int, ...]],
    remote: tuple[Sequence[int], Sequence[tuple[int, ...]]],
    tokens: int,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that meet in a read, here and there; None where any has no partner, or holds nothing of the tokens."""
    if read.remote_group >= len(remote[1]):
        return None
    first, here = local
    oldest, there = remote[0][read.remote_group], remote[1][read.remote_group]
    if read.kind == "mamba":
        return (here, there) if 0 < len(here) == len(there) else None
    end = first + len(here)
    if not here or (end - 1) * plan.block_sizes[read.group] >= tokens:
        return None
    if first < oldest or end > oldest + len(there):
        return None
    return here, there[first - oldest : end - oldest]


def _all_below(ids: tuple[int, ...], count: int) -> bool:
    return min(ids) >= 0 and max(ids) < count


def check_given(copies: Copies) -> None:
    """Look at what `straight_copies` did not, once the bytes are under way: they land in the request's own blocks only.

    Raises `BlockMismatch` for a local id that is given twice: the load must not complete.
    """
    for read, blocks in copies.given:
        if len(set(blocks.here)) != len(blocks.here):
            check_distinct(read.group, BlockList(0, column_of(blocks.here)))


def _copies(
    grid: tuple[Grid, dict[int, Cells]], straight: list[PairedBlocks], split: list[PairedBlocks]
) -> Copies:
    """Decide for each read by itself, and for all that is read in phases together: it may coalesce across reads."""
    numbered = grid[0].numbered
    rows, picked = [], []
    for paired in straight:
        cells = _cells(paired)
        if numbered and (cells <= FEW or left_over(paired) * LEAST_RUN > cells):
            picked.append(paired)
        else:
            rows.append(coalesced(paired))
    if split:
        cells = sum(_cells(paired) for paired in split)
        joined = None if numbered and cells <= FEW else _joined(split)
        if joined is None or (numbered and len(joined) * LEAST_RUN > cells):
            picked += split
        else:
            rows.append(joined)
    return Copies(concatenate(rows), _selection(grid, picked) if picked else None, picked)


def _cells(paired: PairedBlocks) -> int:
    return len(paired.read.rows) * len(paired.mine)


def _joined(split: Sequence[PairedBlocks]) -> Descriptors:
    return coalesce(concatenate([coalesced(paired) for paired in split]))


def _selection(grid: tuple[Grid, dict[int, Cells]], picked: list[PairedBlocks]) -> Selection:
    whole, cells = grid
    here: list[Int32] = []
    there: list[Int32] = []
    for paired in picked:
        first = cells[id(paired.read)]
        here.append((first.local + paired.mine.astype(np.int32)).ravel())
        there.append((first.remote + paired.theirs.astype(np.int32)).ravel())
    return Selection(
        whole,
        here[0] if len(here) == 1 else np.concatenate(here),
        there[0] if len(there) == 1 else np.concatenate(there),
        sum(paired.read.bytes_per_block * len(paired.mine) for paired in picked),
    )
