"""Descriptors: byte runs to copy, of two pages or of a whole request, coalesced; plain numpy columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What to copy: row ``i`` is ``length[i]`` bytes from ``remote[i]`` to ``local[i]`` (or back, for a write).

    Three int64 arrays of one length; addresses are absolute (of two pages: offsets into each), lengths in bytes.
    """

    local: Int64
    remote: Int64
    length: Int64

    def __len__(self) -> int:
        """Number of descriptors."""
        return len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return int(self.length.sum())


NOTHING = Descriptors(*(np.zeros(0, np.int64) for _ in range(3)))


def concatenate(parts: list[Descriptors]) -> Descriptors:
    """All rows of all parts, in order."""
    if not parts:
        return NOTHING
    if len(parts) == 1:
        return parts[0]
    return Descriptors(
        np.concatenate([p.local for p in parts]),
        np.concatenate([p.remote for p in parts]),
        np.concatenate([p.length for p in parts]),
    )


def coalesce(descriptors: Descriptors) -> Descriptors:
    """Join rows that are adjacent on both sides.

    Rows are ordered by local address first, so that runs are found whatever order the blocks came in (freed blocks are
    often handed out in descending order). O(n log n) in numpy, memory linear in rows; less where they are in order.
    """
    n = len(descriptors)
    if n < 2:
        return descriptors
    local, remote, length = descriptors.local, descriptors.remote, descriptors.length
    if (local[1:] < local[:-1]).any():
        # Not where they are in order, as the layers of one buffer are: sorting is most of the time of a plan.
        order = np.argsort(local, kind="stable")
        local, remote, length = local[order], remote[order], length[order]
    breaks = (local[1:] != local[:-1] + length[:-1]) | (remote[1:] != remote[:-1] + length[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    if len(starts) == n:
        return Descriptors(local, remote, length)
    return Descriptors(local[starts], remote[starts], np.add.reduceat(length, starts))
