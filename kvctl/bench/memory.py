"""Real memory for a worker's geometry: cut down to fewer blocks, then placed at addresses of this process."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.model import Layer, Region, WorkerGeometry

ByteArray = NDArray[np.uint8]


@dataclass(frozen=True)
class Memory:
    """A worker's regions as arrays of bytes, and its geometry with their addresses.

    ``device`` is the number of the CUDA device that the memory is on; the arrays are then its image on the host, see
    `kvctl.bench.device`.
    """

    geometry: WorkerGeometry
    regions: tuple[ByteArray, ...]
    device: int | None = None


def with_blocks(worker: WorkerGeometry, blocks: int) -> WorkerGeometry:
    """The same worker with at most ``blocks`` blocks: pages, strides and what lies side by side stay as they are.

    Layers whose pages interleave keep their distances; those that follow each other move up. Regions without layers
    go. It lies on host memory, whatever it lay on.
    """
    blocks = min(blocks, worker.num_blocks)
    offsets: dict[tuple[int, int, int], int] = {}
    lengths: dict[int, int] = {}
    for region in range(len(worker.regions)):
        lengths[region] = _pack(worker, region, blocks, offsets)
    kept = [region for region, length in lengths.items() if length]
    number = {region: position for position, region in enumerate(kept)}

    def moved(layer: Layer) -> Layer:
        offset = offsets[layer.region, layer.offset, layer.stride]
        return dataclasses.replace(layer, region=number[layer.region], offset=offset)

    return dataclasses.replace(
        worker,
        num_blocks=blocks,
        regions=tuple(Region(worker.regions[i].address, lengths[i]) for i in kept),
        groups=tuple(
            dataclasses.replace(group, layers=tuple(map(moved, group.layers))) for group in worker.groups
        ),
    )


def size_of(worker: WorkerGeometry) -> int:
    """Bytes of all its regions."""
    return sum(region.length for region in worker.regions)


def anonymous(size: int) -> mmap.mmap:
    """Zeroed memory of this process."""
    return mmap.mmap(-1, size)


def place(worker: WorkerGeometry, allocate: Callable[[int], mmap.mmap] = anonymous) -> Memory:
    """Memory for the worker; ``allocate`` gives zeros."""
    arrays = tuple(np.frombuffer(allocate(region.length), np.uint8) for region in worker.regions)
    regions = tuple(Region(array.ctypes.data, array.nbytes) for array in arrays)
    return Memory(dataclasses.replace(worker, regions=regions), arrays)


def _pack(worker: WorkerGeometry, region: int, blocks: int, offsets: dict[tuple[int, int, int], int]) -> int:
    """Note the new offset of every layer of a region; return the region's new length."""
    spans = sorted(
        {
            (layer.offset, layer.stride, max(field.end for field in layer.page.fields))
            for group in worker.groups
            for layer in group.layers
            if layer.region == region
        }
    )
    end = shift = old_end = 0
    for offset, stride, content in spans:
        if offset >= old_end:
            # Nothing of what came before reaches as far: what follows may move up to the end of that.
            shift = end - offset
        offsets[region, offset, stride] = offset + shift
        old_end = max(old_end, offset + (worker.num_blocks - 1) * stride + max(stride, content))
        end = max(end, offset + shift + (blocks - 1) * stride + max(stride, content))
    return end
