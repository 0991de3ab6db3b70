"""Columns of numbers in small steps, so that Python's lock is kept.

numpy lets go of the lock for more than 500 elements. A worker's other threads run Python without pause, and each time
it takes tens of microseconds to get the lock back: longer than what there is to do for a thousand blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.topology.descriptors import Int64
from kvd.topology.grid import Int32

KEPT = 500
"""Elements up to which numpy keeps the lock."""
_SPARSE = 64
"""A mark for each of so many numbers costs as much as putting one into a set."""


def column_of(numbers: Sequence[int]) -> Int64:
    """Numbers as a column. numpy's own ways from Python's numbers take twice as long.

    Raises:
        OverflowError: one is too large.
    """
    try:
        return np.frombuffer(bytearray(struct.pack(f"{len(numbers)}q", *numbers)), np.int64)
    except struct.error as error:
        raise OverflowError(f"a number is too large for 64 bits: {error}") from None


def largest(column: Int64 | Int32) -> int:
    """The largest of a column that is not empty, as unsigned numbers: there negative ones are the largest of all."""
    unsigned = column.view(np.uint64 if column.dtype == np.int64 else np.uint32)
    if len(column) <= KEPT:
        return int(np.maximum.reduce(unsigned))
    return int(max([np.maximum.reduce(unsigned[part]) for part in _parts(len(column))]))


def distinct(column: Int64, most: int) -> bool:
    """Whether no number is in a column twice; ``most`` is what `largest` says of it."""
    if most >= _SPARSE * len(column):
        return len(set(column.tolist())) == len(column)
    seen = np.zeros(most + 1, np.bool_)
    for part in _parts(len(column)):
        seen[column[part]] = True
    return int(np.count_nonzero(seen)) == len(column)


def narrow(column: Int64) -> Int32:
    """The same in 32 bits."""
    found = np.empty(len(column), np.int32)
    fill(found, column)
    return found


def fill(target: NDArray[Any], column: NDArray[Any]) -> None:
    """Write a column into one of its length."""
    if len(column) <= KEPT:
        target[:] = column
        return
    for part in _parts(len(column)):
        target[part] = column[part]


def _parts(count: int) -> list[slice]:
    return [slice(at, at + KEPT) for at in range(0, count, KEPT)]
