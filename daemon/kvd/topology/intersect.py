"""The one operation of planning: intersect two shards of the same logical tensor and lower the result to byte runs.

For each label the coordinates of both boxes are matched; the byte offsets of the matches are two columns of numbers. A
field's runs are the outer sum of those columns over its labels, innermost first, joined wherever two neighbours are
adjacent on both sides. Layouts, joined K and V, kernel blocks and context-parallel interleaving need no case of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvd.geometry.model import Field
from kvd.topology.descriptors import Int64


@dataclass(frozen=True, slots=True)
class Table:
    """Byte runs of one page pair: ``length[i]`` bytes at ``remote[i]`` of the remote page belong at ``local[i]`` of the local.

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


def coordinates(field: Field, label: str) -> tuple[Int64, Int64]:
    """Global indices of ``label`` that this box holds and the byte offset of each, two int64 columns of one length."""
    index, offset = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for axis in field.axes_of(label):
        steps = np.arange(axis.extent, dtype=np.int64)
        index = (index[:, None] + axis.start + steps * axis.step).ravel()
        offset = (offset[:, None] + steps * axis.stride).ravel()
    return index, offset


def intersect(local: Field, remote: Field, *, shifts: tuple[int, int] = (0, 0), wanted: Mapping[str, Int64] | None = None) -> Table:
    """Runs of the elements that both boxes hold.

    ``shifts`` are added to the ``token`` indices of the two sides: blocks of different sizes meet at different phases.
    ``wanted`` restricts labels to the given (local, shifted) indices. Both fields must have the same labels.
    """
    runs = Table(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, local.itemsize, np.int64))
    for label in sorted(local.labels, key=lambda name: min(a.stride for a in local.axes_of(name))):
        mine, mine_offset = coordinates(local, label)
        theirs, theirs_offset = coordinates(remote, label)
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


def join(runs: Table) -> Table:
    """The same bytes in as few runs as possible: ordered by local offset, neighbours adjacent on both sides made one."""
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
