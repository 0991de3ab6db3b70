"""The one operation of planning: intersect two shards of the same logical tensor and lower the result to byte runs.

For each label the coordinates of both boxes are matched; the byte offsets of the matches are two columns of numbers. A
field's runs are the outer sum of those columns over its labels, innermost first, joined wherever two neighbours are
adjacent on both sides. Layouts, joined K and V, kernel blocks and context-parallel interleaving need no case of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.model import Field
from kvd.topology.descriptors import Int64

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Table:
    """Byte runs of one page pair: ``length[i]`` bytes at ``remote[i]`` of the remote page belong at ``local[i]`` here.

    Three int64 columns ordered by ``local``; offsets in bytes from the start of each page.
    """

    local: Int64
    remote: Int64
    length: Int64

    @property
    def nbytes(self) -> int:
        """Bytes in all runs."""
        return int(self.length.sum())

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.length)


Steps = tuple[tuple[int, int, int], ...]
"""A series of numbers as (start, extent, step) for each axis that it is summed over."""


def steps_of(field: Field, label: str) -> Steps:
    """The global indices of ``label`` that this box holds, as steps."""
    return tuple((a.start, a.extent, a.step) for a in field.axes if a.label == label)


@lru_cache(maxsize=4096)
def series(steps: Steps) -> Int64:
    """The numbers of ``steps``, the last axis running fastest; read-only, since calls share it."""
    numbers = np.zeros(1, np.int64)
    for start, extent, step in steps:
        numbers = (numbers[:, None] + start + np.arange(extent, dtype=np.int64) * step).ravel()
    numbers.flags.writeable = False
    return numbers


@lru_cache(maxsize=4096)
def held(mine: Steps, theirs: Steps, shift: int) -> Flags:
    """For each of my numbers whether it is one of theirs, which are ``shift`` higher; read-only."""
    numbers, others = series(mine), series(theirs) + shift
    inside: Flags = (numbers >= others.min()) & (numbers <= others.max())
    known = np.zeros(int(others.max() - others.min()) + 1, bool)
    known[others - others.min()] = True
    inside[inside] = known[numbers[inside] - others.min()]
    inside.flags.writeable = False
    return inside


def intersect(
    local: Field,
    remote: Field,
    *,
    shifts: tuple[int, int] = (0, 0),
    wanted: Mapping[str, Int64] | None = None,
) -> Table:
    """Runs of the elements that both boxes hold.

    ``shifts`` are added to the ``token`` indices of the two sides: blocks of different sizes meet at different phases.
    ``wanted`` restricts labels to the given (local, shifted) indices. Both fields must have the same labels.
    """
    runs = Table(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, local.itemsize, np.int64))
    for label in sorted(local.labels, key=lambda name: min(a.stride for a in local.axes_of(name))):
        mine, theirs = series(steps_of(local, label)), series(steps_of(remote, label))
        mine_offset, theirs_offset = _offsets(local, label), _offsets(remote, label)
        if label == "token":
            mine, theirs = mine + shifts[0], theirs + shifts[1]
        _, at_mine, at_theirs = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        if wanted is not None and label in wanted:
            keep = np.isin(mine[at_mine], wanted[label])
            at_mine, at_theirs = at_mine[keep], at_theirs[keep]
        runs = join(
            Table(
                (mine_offset[at_mine][:, None] + runs.local).ravel(),
                (theirs_offset[at_theirs][:, None] + runs.remote).ravel(),
                np.broadcast_to(runs.length, (len(at_mine), len(runs))).ravel(),
            )
        )
    return Table(runs.local + local.offset, runs.remote + remote.offset, runs.length)


def _offsets(field: Field, label: str) -> Int64:
    """Bytes from the first element to each that `series` names."""
    return series(tuple((0, a.extent, a.stride) for a in field.axes if a.label == label))


def join(runs: Table) -> Table:
    """The same bytes in as few runs as possible: ordered by local offset, neighbours adjacent on both sides joined."""
    if len(runs) < 2:
        return runs
    order = np.argsort(runs.local, kind="stable")
    local, remote, length = runs.local[order], runs.remote[order], runs.length[order]
    breaks = (local[1:] != local[:-1] + length[:-1]) | (remote[1:] != remote[:-1] + length[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Table(local[starts], remote[starts], np.add.reduceat(length, starts))


def stack(tables: list[Table]) -> Table:
    """All runs of all tables, joined."""
    return join(
        Table(
            np.concatenate([t.local for t in tables]),
            np.concatenate([t.remote for t in tables]),
            np.concatenate([t.length for t in tables]),
        )
    )
