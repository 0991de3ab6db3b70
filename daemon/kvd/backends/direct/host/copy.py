"""The rows of a direct copy, copied call by call."""

from __future__ import annotations

import numpy as np

from kvd.backends.direct.calls import IOV_MAX, read_rows
from kvd.topology.descriptors import Descriptors

CALL_BYTES = 32 << 20
"""Most bytes of one call: some milliseconds, during which a lane cannot be closed."""


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
