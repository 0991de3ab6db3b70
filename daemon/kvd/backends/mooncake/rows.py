"""A post's rows as Mooncake takes them: inside registered memory, which it does not check, and cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.backends import rows
from kvd.backends.envelope import joined
from kvd.backends.errors import TransferRefused
from kvd.backends.mooncake.library import NAME
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors, Int64


class Bounds:
    """The registered memory of one side: ``side`` is "local" or the peer's name, for messages."""

    def __init__(self, side: str, regions: Sequence[Region]) -> None:
        self.side = side
        spans = joined(regions)
        self._starts = np.array([s.address for s in spans], np.int64)
        self._ends = np.array([s.address + s.length for s in spans], np.int64)

    def check(self, addresses: Int64, lengths: Int64) -> None:
        """Refuse the first row that does not lie inside one span of registered memory.

        Raises:
            TransferRefused: naming the row, its address and its length.
        """
        if not len(addresses):
            return
        row = rows.outside(addresses, lengths, self._starts, self._ends)
        if row is not None:
            raise TransferRefused(
                f"{self.side} descriptor {row}, {int(lengths[row])} bytes at {int(addresses[row]):#x}, lies outside "
                f"the {len(self._starts)} spans of registered memory",
                backend=NAME,
                hint="only registered memory is read or written",
            )


def checked(descriptors: Descriptors, local: Bounds, remote: Bounds) -> Descriptors:
    """The descriptors with rows of no bytes left out.

    Raises:
        TransferRefused: as `kvd.backends.rows.checked`, or a row outside either side's memory.
    """
    kept = rows.checked(descriptors, backend=NAME)
    local.check(kept.local, kept.length)
    remote.check(kept.remote, kept.length)
    return kept


def cut(whole: Descriptors, piece: int) -> Descriptors:
    """The same bytes in rows of ``piece`` bytes at most.

    Mooncake moves one descriptor over one connection, several over several.
    """
    if not len(whole) or int(whole.length.max()) <= piece:
        return whole
    parts = -(-whole.length // piece)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    offset = (np.arange(int(parts.sum())) - first) * piece
    length = np.minimum(np.repeat(whole.length, parts) - offset, piece)
    return Descriptors(
        np.repeat(whole.local, parts) + offset, np.repeat(whole.remote, parts) + offset, length
    )
