"""The rows of a direct copy: checked before anything moves, then copied call by call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.backends import rows
from kvd.backends.direct.host.calls import IOV_MAX, read_rows
from kvd.backends.direct.process import NAME
from kvd.backends.errors import TransferRefused
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors, Int64, coalesce
from kvd.topology.grid import Selection

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


def unpicked(selection: Selection) -> Descriptors:
    """The copies of ``selection`` by address, neighbours joined.

    Raises:
        TransferRefused: columns of unequal length, or a cell that the grid does not have.
    """
    if len(selection.local) != len(selection.remote):
        raise TransferRefused(
            f"selections differ in length: {len(selection.local)} local, {len(selection.remote)} remote",
            backend=NAME,
        )
    grid = selection.grid
    for cells, blocks in ((selection.local, grid.local_blocks), (selection.remote, grid.remote_blocks)):
        if len(cells) and not 0 <= int(cells.min()) <= int(cells.max()) < len(grid) * blocks:
            raise TransferRefused(
                f"cells {int(cells.min())}..{int(cells.max())} picked of a grid of {len(grid) * blocks}",
                backend=NAME,
            )
    return coalesce(selection.descriptors())


class Copy:
    """A copy under way: ``row`` is the first that is not complete, ``done`` bytes of it are."""

    def __init__(self, rows: Descriptors) -> None:
        """Of rows that all have bytes."""
        self.rows = rows
        self.row = 0
        self.done = 0
        self._ends = rows.length.cumsum()
        # The kernel's iovecs. What is complete of a row is taken off its entries.
        self._here = np.empty((len(rows), 2), np.uint64)
        self._there = np.empty((len(rows), 2), np.uint64)
        self._here[:, 0], self._there[:, 0] = rows.local, rows.remote
        self._here[:, 1] = self._there[:, 1] = rows.length

    @property
    def complete(self) -> bool:
        """Whether all rows are copied."""
        return self.row == len(self.rows)

    def advance(self, pid: int) -> None:
        """One call: at most `IOV_MAX` rows and `CALL_BYTES` bytes of process ``pid``. Not on a complete one.

        Raises:
            OSError: as `read_rows`, with nothing copied by this call.
        """
        row, ends = self.row, self._ends
        begun = int(ends[row]) - int(self._here[row, 1])
        most = begun + CALL_BYTES
        end = min(len(ends), row + IOV_MAX, int(ends.searchsorted(most)) + 1)
        here, there = self._here[row:end], self._there[row:end]
        if (beyond := int(ends[end - 1]) - most) > 0:
            here, there = here.copy(), there.copy()
            here[-1, 1] = there[-1, 1] = int(here[-1, 1]) - beyond
        now = begun + read_rows(pid, here, there)
        self.row = int(ends.searchsorted(now, side="right"))
        self.done = 0
        if not self.complete:
            self.done = now - int(ends[self.row]) + int(self.rows.length[self.row])
            for side, addresses in ((self._here, self.rows.local), (self._there, self.rows.remote)):
                side[self.row] = (
                    int(addresses[self.row]) + self.done,
                    int(self.rows.length[self.row]) - self.done,
                )
