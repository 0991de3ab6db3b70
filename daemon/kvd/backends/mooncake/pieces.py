"""A post's rows cut into pieces, as Mooncake takes them."""

from __future__ import annotations

import numpy as np

from kvd.topology.descriptors import Descriptors


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
