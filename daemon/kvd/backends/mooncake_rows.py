"""A post's rows as Mooncake takes them: inside registered memory, which it does not check, and cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.backends.envelope import joined
from kvd.backends.errors import TransferRefused
from kvd.backends.mooncake_library import NAME
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
        below = np.searchsorted(self._starts, addresses, side="right") - 1
        fits = (below >= 0) & (addresses + lengths <= self._ends[np.maximum(below, 0)])
        if not fits.all():
            row = int(np.argmin(fits))
            raise TransferRefused(
                f"{self.side} descriptor {row}, {int(lengths[row])} bytes at {int(addresses[row]):#x}, lies outside "
                f"the {len(self._starts)} spans of registered memory",
                backend=NAME,
                hint="only registered memory is read or written",
            )


def checked(descriptors: Descriptors, local: Bounds, remote: Bounds) -> Descriptors:
    """The descriptors with rows of no bytes left out.

    Raises:
        TransferRefused: columns of unequal length, a negative number, or a row outside either side's memory.
    """
    lengths = {len(descriptors.local), len(descriptors.remote), len(descriptors.length)}
    if len(lengths) > 1:
        raise TransferRefused(
            f"descriptor columns differ in length: {len(descriptors.local)} local, {len(descriptors.remote)} remote, "
            f"{len(descriptors.length)} lengths",
            backend=NAME,
        )
    if len(descriptors) and (least := int(descriptors.length.min())) < 0:
        raise TransferRefused(f"a descriptor has length {least}; lengths are not negative", backend=NAME)
    local.check(descriptors.local, descriptors.length)
    remote.check(descriptors.remote, descriptors.length)
    keep = descriptors.length > 0
    if keep.all():
        return descriptors
    return Descriptors(descriptors.local[keep], descriptors.remote[keep], descriptors.length[keep])


def cut(rows: Descriptors, piece: int) -> Descriptors:
    """The same bytes in rows of ``piece`` bytes at most.

    Mooncake moves one descriptor over one connection, several over several.
    """
    if not len(rows) or int(rows.length.max()) <= piece:
        return rows
    parts = -(-rows.length // piece)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    offset = (np.arange(int(parts.sum())) - first) * piece
    length = np.minimum(np.repeat(rows.length, parts) - offset, piece)
    return Descriptors(np.repeat(rows.local, parts) + offset, np.repeat(rows.remote, parts) + offset, length)
