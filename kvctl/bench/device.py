"""Memory of a worker on a CUDA device, with an image of it on the host that is filled and compared."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvctl.bench.memory import ByteArray, Memory, place
from kvd.backends.cuda import driver as cuda_driver
from kvd.geometry.model import Region, WorkerGeometry

CHUNK = 64 << 20
"""Bytes that cross to the host or back at a time."""


def place_on(worker: WorkerGeometry, device: int) -> Memory:
    """Zeroed memory for the worker on ``device``; it is there until the process ends.

    Raises `BackendError` where there is no driver, no such device or no room.
    """
    image = place(worker)
    regions = tuple(
        Region(cuda_driver.allocate(device, region.length), region.length, f"cuda:{device}")
        for region in image.geometry.regions
    )
    memory = Memory(dataclasses.replace(image.geometry, regions=regions), image.regions, device)
    put(memory)
    return memory


def put(memory: Memory) -> None:
    """Copy the image to the device; nothing for memory of the host, which is its own image."""
    for device, address, image in _chunks(memory):
        cuda_driver.write(device, address, image.tobytes())


def get(memory: Memory) -> None:
    """Copy the device's memory into the image; nothing for memory of the host."""
    for device, address, image in _chunks(memory):
        image[:] = np.frombuffer(cuda_driver.read(device, address, image.nbytes), np.uint8)


def _chunks(memory: Memory) -> Iterator[tuple[int, int, ByteArray]]:
    """The device and addresses on it, each with its part of the image; nothing for memory of the host."""
    if memory.device is not None:
        for region, image in zip(memory.geometry.regions, memory.regions, strict=True):
            for at in range(0, region.length, CHUNK):
                yield memory.device, region.address + at, image[at : at + CHUNK]


def copied(memory: Memory, size: int) -> dict[str, Any]:
    """Copy ``size`` bytes, or half of the largest region where that is less, within the device: seconds and bytes.

    Raises `BackendError` where the device reports an error.
    """
    if memory.device is None:
        raise ValueError("this memory is on no device")
    region = max(memory.geometry.regions, key=lambda one: one.length)
    size = min(size, region.length // 2)
    started = time.perf_counter()
    cuda_driver.copy(memory.device, region.address + size, region.address, size)
    return {"seconds": time.perf_counter() - started, "bytes": size}
