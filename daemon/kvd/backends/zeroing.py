"""Zeroes bytes of a worker's KV memory, on the host or on a CUDA device, and returns when they are zero.

A few hundred short runs are usual: a part of one block in every layer. Each call into C that lets go of Python's lock
may wait for it again behind whatever thread runs, so short runs on the host and launches on a device keep it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.errors import BackendError
from kvd.backends.regions import parse_device
from kvd.geometry.model import Region
from kvd.topology.leftover import Runs

LONG = 1 << 20
"""Bytes of a run on the host for which Python's lock is let go: they take longer than getting it back."""
MAX_PITCH = 1 << 30
"""Bytes between rows of one launch; drivers take up to 2 GiB."""

_holding, _yielding = (library(None).memset for library in (ctypes.PyDLL, ctypes.CDLL))
for _function in (_holding, _yielding):
    _function.argtypes, _function.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p


def zero(regions: Sequence[Region], runs: Runs) -> None:
    """Zero ``runs``, which lie in ``regions``; may be called on any thread.

    Raises:
        BackendError: a run is outside every region, memory is of a kind that is not known here or on several devices,
            or the device reports an error. Nothing is zeroed in the first two cases.
    """
    if not len(runs):
        return
    _check(regions, runs)
    device = cuda_driver.ordinal(regions)
    if device is None:
        for address, length in zip(runs.address.tolist(), runs.length.tolist(), strict=True):
            (_holding if length < LONG else _yielding)(address, 0, length)
    else:
        cuda_driver.zero(device, boxes(runs, [region.address for region in regions]))


class Box(NamedTuple):
    """``height`` rows of ``width`` bytes, ``pitch`` bytes from one to the next."""

    address: int
    pitch: int
    width: int
    height: int


def boxes(runs: Runs, begins: Sequence[int] = ()) -> Iterator[Box]:
    """The same bytes as few boxes: neighbours of one length that stand at one distance are rows of one.

    No box reaches over one of ``begins``, where regions begin: allocations of equal size often stand at one distance,
    and drivers refuse a box that reaches from one allocation into the next.
    """
    count = len(runs)
    step, width = np.diff(runs.address), runs.length
    region = np.searchsorted(np.sort(np.asarray(begins, np.int64)), runs.address, side="right")
    alike = (width[1:] == width[:-1]) & (step <= MAX_PITCH) & (region[1:] == region[:-1])
    step = np.where(alike, step, 0)  # 0 is no distance between two runs
    ends = [*(np.flatnonzero(step[1:] != step[:-1]) + 1).tolist(), len(step)] if count > 1 else []
    addresses, widths, steps = runs.address.tolist(), width.tolist(), step.tolist()
    at = 0
    for end in ends:  # from run `at` to run `end` the distance is the same
        if at < end and steps[end - 1]:
            yield Box(addresses[at], steps[end - 1], widths[at], end + 1 - at)
            at = end + 1
        elif at < end:
            yield from (Box(addresses[i], widths[i], widths[i], 1) for i in range(at, end))
            at = end
    yield from (Box(addresses[i], widths[i], widths[i], 1) for i in range(at, count))


def _check(regions: Sequence[Region], runs: Runs) -> None:
    kinds = sorted({parse_device(region.device)[0] for region in regions} - {"cpu", "cuda"})
    if kinds:
        raise BackendError(f"memory of {', '.join(kinds)} cannot be zeroed here: cpu and cuda only")
    inside = np.zeros(len(runs), bool)
    for region in regions:
        end = region.address + region.length
        inside |= (runs.address >= region.address) & (runs.address + runs.length <= end)
    if not inside.all():
        at = int(inside.argmin())
        address, length = int(runs.address[at]), int(runs.length[at])
        raise BackendError(f"{length} bytes at {address:#x} are outside every region and are not zeroed")
