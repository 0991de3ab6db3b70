"""What one request copies: coalesced descriptors where its blocks lie together, picks of a grid where they do not.

Coalesced descriptors are fewest, but a backend must check each one's address and prepare it for the post. Cells of a
grid were checked when the grid was prepared; a pick costs a fraction of a descriptor's time, but there is one for each
block. `LEAST_RUN` is where the two meet, and below `FEW` cells picks cost least whatever the runs, as nothing need be
joined (docs/geometry.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvd.topology.blocks import BlockList
from kvd.topology.compile import coalesced, left_over
from kvd.topology.descriptors import Descriptors, coalesce, concatenate
from kvd.topology.grid import Grid, Int32, Picks
from kvd.topology.meeting import Met, meetings, phased
from kvd.topology.plan import Cells, Plan

LEAST_RUN = 6
"""Blocks that a descriptor must join on average to be worth more than picks."""
FEW = 4096
"""Cells so few that joining them takes longer than it saves. Backends that take picks join neighbours themselves."""


@dataclass(slots=True)
class Copies:
    """What is to be copied from (or to) one remote worker."""

    descriptors: Descriptors = field(default_factory=lambda: concatenate([]))
    picks: Picks | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.descriptors.nbytes + (self.picks.nbytes if self.picks else 0)

    @property
    def runs(self) -> int:
        """Descriptors after coalescing, whether they were made or not."""
        return len(self.descriptors) + (self.picks.runs if self.picks else 0)


def compile_request(
    plan: Plan, local: Mapping[int, BlockList], remote: Mapping[int, BlockList], *, tokens: int
) -> dict[int, Copies]:
    """The copies of one request by position of the remote worker; arguments and errors as of `compile_plan`."""
    found: dict[int, tuple[list[Met], list[Met]]] = {}
    for met in meetings(plan, local, remote, tokens):
        found.setdefault(met.read.remote, ([], []))[phased(met.read)].append(met)
    return {
        position: _copies(plan.grids[position], straight, split)
        for position, (straight, split) in found.items()
    }


def _copies(grid: tuple[Grid, dict[int, Cells]], straight: list[Met], split: list[Met]) -> Copies:
    """Decide for each read by itself, and for all that is read in phases together: it may coalesce across reads."""
    rows, picked, left = [], [], 0
    for met in straight:
        count = left_over(met)
        if _by_number(grid[0], count, len(met.read.rows) * len(met.mine)):
            picked.append(met)
            left += count
        else:
            rows.append(coalesced(met))
    if split:
        joined = coalesce(concatenate([coalesced(met) for met in split]))
        if _by_number(grid[0], len(joined), sum(len(met.read.rows) * len(met.mine) for met in split)):
            picked += split
            left += len(joined)
        else:
            rows.append(joined)
    return Copies(concatenate(rows), _picks(grid, picked, left) if picked else None)


def _by_number(grid: Grid, descriptors: int, cells: int) -> bool:
    return grid.numbered and (cells <= FEW or descriptors * LEAST_RUN > cells)


def _picks(grid: tuple[Grid, dict[int, Cells]], picked: list[Met], left: int) -> Picks:
    whole, cells = grid
    here: list[Int32] = []
    there: list[Int32] = []
    for met in picked:
        first = cells[id(met.read)]
        here.append((first.local + met.mine.astype(np.int32)).ravel())
        there.append((first.remote + met.theirs.astype(np.int32)).ravel())
    return Picks(
        whole,
        here[0] if len(here) == 1 else np.concatenate(here),
        there[0] if len(there) == 1 else np.concatenate(there),
        sum(met.read.bytes_per_block * len(met.mine) for met in picked),
        left,
    )
