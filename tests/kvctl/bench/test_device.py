"""Memory on a CUDA device and its image on the host, with a driver that keeps "device" memory in this process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from kvctl.bench import device
from kvctl.bench.memory import with_blocks
from kvctl.engines.sources import planned
from kvd.backends.cuda import driver as cuda_driver


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Device and size of everything that was allocated."""
    found: list[tuple[int, int]] = []
    kept = []

    def allocate(number: int, size: int) -> int:
        found.append((number, size))
        kept.append(np.frombuffer(mmap.mmap(-1, size), np.uint8))
        kept[-1][:] = 0xAA
        return int(kept[-1].ctypes.data)

    def copy(_: int, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    monkeypatch.setattr(cuda_driver, "allocate", allocate)
    monkeypatch.setattr(cuda_driver, "write", lambda _, at, data: ctypes.memmove(at, data, len(data)))
    monkeypatch.setattr(cuda_driver, "read", lambda _, at, size: ctypes.string_at(at, size))
    monkeypatch.setattr(cuda_driver, "copy", copy)
    monkeypatch.setattr(device, "CHUNK", 100_000)
    return found


def test_a_workers_memory_is_on_its_device_and_begins_as_zeros(allocated: list[tuple[int, int]]) -> None:
    worker = with_blocks(planned("llama-3.1-8b", "tp=8").workers[0], 16)
    memory = device.place_on(worker, 3)
    assert allocated == [(3, region.length) for region in worker.regions]
    assert {region.device for region in memory.geometry.regions} == {"cuda:3"}
    first = memory.geometry.regions[0]
    assert ctypes.string_at(first.address, first.length) == bytes(first.length)


@pytest.mark.usefixtures("allocated")
def test_the_image_is_put_and_got_whole() -> None:
    memory = device.place_on(with_blocks(planned("llama-3.1-8b", "tp=8").workers[0], 16), 0)
    made = np.random.default_rng(0).integers(0, 256, memory.regions[0].size, np.uint8)
    memory.regions[0][:] = made
    device.put(memory)
    memory.regions[0][:] = 0
    device.get(memory)
    assert (memory.regions[0] == made).all()


@pytest.mark.usefixtures("allocated")
def test_the_ceiling_on_a_device_is_a_copy_within_a_region() -> None:
    memory = device.place_on(with_blocks(planned("llama-3.1-8b", "tp=8").workers[0], 16), 0)
    largest = max(region.length for region in memory.geometry.regions)
    found = device.copied(memory, 1 << 40)
    assert found["bytes"] == largest // 2
    assert found["seconds"] > 0
