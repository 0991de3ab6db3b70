"""The rows of a direct copy: checked before anything moves, then copied call by call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.backends import rows
from kvd.backends.direct_calls import IOV_MAX, read_rows
from kvd.backends.direct_process import NAME
from kvd.backends.errors import TransferRefused
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors, Int64, coalesce
from kvd.topology.grid import Picks

CALL_BYTES = 32 << 20
"""Most bytes of one call: some milliseconds, during which a lane cannot be closed."""


class Spans:
    """Registered memory, and where each span's bytes are to be read: ``moved_to``, or in place.

    ``spans`` are sorted by address and apart from each other, as `kvd.backends.envelope.joined` gives them; neighbours
    may stay two where they are read at places apart.
    """

    def __init__(self, spans: Sequence[Region], moved_to: Sequence[int] = ()) -> None:
        self._first = np.array([s.address for s in spans], np.int64)
        self._end = np.array([s.address + s.length for s in spans], np.int64)
        self._move = np.array(moved_to, np.int64) - self._first if moved_to else None

    def outside(self, addresses: Int64, lengths: Int64) -> int | None:
        """The first row that does not lie inside one span."""
        return rows.outside(addresses, lengths, self._first, self._end)

    def where(self, addresses: Int64) -> Int64:
        """Where to read these addresses, which lie inside."""
        if self._move is None:
            return addresses
        moved: Int64 = addresses + self._move[np.searchsorted(self._first, addresses, side="right") - 1]
        return moved


def checked(descriptors: Descriptors, local: Spans, remote: Spans) -> Descriptors:
    """The descriptors with rows of no bytes left out, remote addresses as `Spans.where` gives them.

    Raises:
        TransferRefused: as `kvd.backends.rows.checked`, or a row outside the registered memory.
    """
    kept = rows.checked(descriptors, backend=NAME)
    if not len(kept):
        return kept
    here, there, lengths = kept.local, kept.remote, kept.length
    for side, addresses, spans in (("local", here, local), ("remote", there, remote)):
        row = spans.outside(addresses, lengths)
        if row is not None:
            raise TransferRefused(
                f"{side} descriptor {row}, {int(lengths[row])} bytes at {int(addresses[row]):#x}, is not registered",
                backend=NAME,
            )
    return Descriptors(here, remote.where(there), lengths)


def unpicked(picks: Picks) -> Descriptors:
    """The copies of ``picks`` by address, neighbours joined.

    Raises:
        TransferRefused: columns of unequal length, or a cell that the grid does not have.
    """
    if len(picks.local) != len(picks.remote):
        raise TransferRefused(
            f"picks differ in length: {len(picks.local)} local, {len(picks.remote)} remote", backend=NAME
        )
    grid = picks.grid
    for cells, blocks in ((picks.local, grid.local_blocks), (picks.remote, grid.remote_blocks)):
        if len(cells) and not 0 <= int(cells.min()) <= int(cells.max()) < len(grid) * blocks:
            raise TransferRefused(
                f"cells {int(cells.min())}..{int(cells.max())} picked of a grid of {len(grid) * blocks}",
                backend=NAME,
            )
    return coalesce(picks.descriptors())


@dataclass(slots=True, eq=False)
class Copy:
    """A copy under way: ``row`` is the first that is not complete, ``done`` bytes of it are."""

    rows: Descriptors
    row: int = 0
    done: int = 0

    @property
    def complete(self) -> bool:
        """Whether all rows are copied."""
        return self.row == len(self.rows)

    def advance(self, pid: int) -> None:
        """One call: at most `IOV_MAX` rows and `CALL_BYTES` bytes of process ``pid``. Not on a complete one.

        Raises:
            OSError: as `read_rows`, with nothing copied by this call.
        """
        part = slice(self.row, self.row + IOV_MAX)
        local, remote, length = (
            column[part].astype(np.uint64) for column in (self.rows.local, self.rows.remote, self.rows.length)
        )
        begun = np.uint64(self.done)
        local[0] += begun
        remote[0] += begun
        length[0] -= begun
        until = np.cumsum(length)
        count = min(len(length), int(np.searchsorted(until, CALL_BYTES)) + 1)
        length[count - 1] -= max(int(until[count - 1]) - CALL_BYTES, 0)
        copied = read_rows(
            pid,
            np.stack((local[:count], length[:count]), axis=1),
            np.stack((remote[:count], length[:count]), axis=1),
        )
        whole = int(np.searchsorted(until[:count], copied, side="right"))
        left = copied - (int(until[whole - 1]) if whole else 0)
        self.row, self.done = self.row + whole, left if whole else self.done + left
