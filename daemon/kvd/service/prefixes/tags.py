"""Sets of tags as sorted arrays, eight bytes a tag; pure functions on them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.wire.hints import TAG_BYTES
from kvd.wire.prefix import HASH_BYTES

TagSet: TypeAlias = NDArray[np.uint64]
"""Each once, in order."""

NONE: TagSet = np.empty(0, np.uint64)


def unpacked(tags: bytes) -> TagSet:
    """The whole tags of a message."""
    whole = np.frombuffer(tags, "<u8", len(tags) // TAG_BYTES)
    return np.unique(whole.astype(np.uint64, copy=False))


def packed(tags: TagSet) -> bytes:
    """Tags for a message."""
    return tags.astype("<u8", copy=False).tobytes()


def tags_of(hashes: bytes, every: int) -> NDArray[np.uint64]:
    """The tags of each ``every``-th block of a prompt, in the prompt's order."""
    blocks = len(hashes) // HASH_BYTES
    if blocks < every:
        return NONE
    rows = np.frombuffer(hashes, np.uint8, blocks * HASH_BYTES).reshape(blocks, HASH_BYTES)
    return rows[every - 1 :: every, :TAG_BYTES].copy().view("<u8").ravel().astype(np.uint64, copy=False)


def changed(tags: TagSet, added: TagSet, dropped: TagSet) -> TagSet:
    """With these and without those; what is in both is in."""
    left = tags[~member(tags, dropped)] if len(dropped) else tags
    return np.union1d(left, added) if len(added) else left


def member(wanted: NDArray[np.uint64], tags: TagSet) -> NDArray[np.bool_]:
    """Of each one wanted whether it is there."""
    if not len(tags):
        return np.zeros(len(wanted), np.bool_)
    places = np.searchsorted(tags, wanted)
    places[places == len(tags)] = 0
    found: NDArray[np.bool_] = tags[places] == wanted
    return found


def longest(prompt: NDArray[np.uint64], tags: TagSet) -> int:
    """How many of a prompt's tags there are up to the last one that is held."""
    found = np.flatnonzero(member(prompt, tags))
    return int(found[-1]) + 1 if len(found) else 0
