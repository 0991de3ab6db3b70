"""What every adapter asks of a post's rows before it takes them."""

from __future__ import annotations

import numpy as np

from kvd.backends.errors import TransferRefused
from kvd.topology.descriptors import Descriptors, Int64


def checked(descriptors: Descriptors, *, backend: str) -> Descriptors:
    """The descriptors with rows of no bytes left out.

    Raises:
        TransferRefused: columns of unequal length, or a negative address or length; in the name of ``backend``.
    """
    columns = (descriptors.local, descriptors.remote, descriptors.length)
    here, there, lengths = map(len, columns)
    if not here == there == lengths:
        raise TransferRefused(
            f"descriptor columns differ in length: {here} local, {there} remote, {lengths} lengths",
            backend=backend,
        )
    if not lengths:
        return descriptors
    least = [int(column.min()) for column in columns]
    if min(least) < 0:
        raise TransferRefused(
            f"a descriptor holds {min(least)}; addresses and lengths are not negative", backend=backend
        )
    if least[2]:
        return descriptors
    keep = descriptors.length > 0
    return Descriptors(*(column[keep] for column in columns))


def outside(addresses: Int64, lengths: Int64, first: Int64, end: Int64) -> int | None:
    """The first row that does not lie inside one span; ``first`` and ``end`` are those of the spans, in order."""
    at = np.maximum(np.searchsorted(first, addresses, side="right") - 1, 0)
    fits = (addresses >= first[at]) & (addresses + lengths <= end[at])
    return None if fits.all() else int(np.argmin(fits))
