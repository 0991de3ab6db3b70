"""Sets of tags as sorted arrays, eight bytes a tag; pure functions on them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.wire.prefix import HASH_BYTES
from kvd.wire.prefixes.hints import TAG_BYTES

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


class PromptTags:
    """The tags of one prompt, for engines that tell one for each so many blocks."""

    def __init__(self, hashes: bytes, hash_tokens: int) -> None:
        self.hash_tokens = hash_tokens
        self._hashes = hashes
        self._by_every: dict[int, NDArray[np.uint64]] = {}

    def each(self, every: int) -> NDArray[np.uint64]:
        """Those of each ``every``-th block."""
        if every not in self._by_every:
            self._by_every[every] = tags_of(self._hashes, every)
        return self._by_every[every]


def changed(tags: TagSet, added: TagSet, dropped: TagSet) -> TagSet:
    """With these and without those; what is in both is in."""
    left = np.delete(tags, tags.searchsorted(dropped[member(dropped, tags)]))
    new = added[~member(added, left)]
    return np.insert(left, left.searchsorted(new), new)


def member(wanted: NDArray[np.uint64], tags: TagSet) -> NDArray[np.bool_]:
    """Of each one wanted whether it is there."""
    if not len(tags):
        return np.zeros(len(wanted), np.bool_)
    found: NDArray[np.bool_] = tags.take(tags.searchsorted(wanted), mode="clip") == wanted
    return found


def longest(prompt: NDArray[np.uint64], tags: TagSet) -> int:
    """How many of a prompt's tags there are up to the last one that is held."""
    found = member(prompt, tags)
    return int(np.flatnonzero(found)[-1]) + 1 if found.any() else 0
