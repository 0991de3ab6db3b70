"""A post's rows as NIXL takes them: one table a side, of one kind of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvd.backends.nixl.agent import MEMORY
from kvd.backends.regions import RegisteredMemory, parse_device
from kvd.topology.descriptors import Descriptors, Int64


@dataclass(frozen=True, slots=True)
class ListPart:
    """Rows (address, bytes, device ordinal) of both sides of a post, each side in one kind of memory."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    local_memory: str
    remote_memory: str


def parts(rows: Descriptors, local: RegisteredMemory, remote: RegisteredMemory) -> Iterator[ListPart]:
    """Split by kind of memory: one list of NIXL's is all DRAM or all VRAM, on whatever devices."""
    if not len(rows):
        return
    here, there = side(rows.local, rows.length, local), side(rows.remote, rows.length, remote)
    pairs = [(a, b) for a in memories(local) for b in memories(remote)]
    if len(pairs) == 1:
        yield ListPart(here, there, *pairs[0])
        return
    here_memory, there_memory = _memory(rows.local, local), _memory(rows.remote, remote)
    for a, b in pairs:
        if (chosen := (here_memory == a) & (there_memory == b)).any():
            yield ListPart(here[chosen], there[chosen], a, b)


def side(addresses: Int64, lengths: Int64, memory: RegisteredMemory) -> NDArray[np.uint64]:
    """One side's rows (address, bytes, device ordinal), shape (n, 3)."""
    ordinals, _ = _devices(memory.devices)
    table = np.empty((len(addresses), 3), np.uint64)
    table[:, 0], table[:, 1] = addresses, lengths
    table[:, 2] = ordinals[0] if len(ordinals) == 1 else ordinals[memory.device_of(addresses)]
    return table


def memories(memory: RegisteredMemory) -> list[str]:
    """NIXL's names of the kinds of memory that a worker has."""
    return list(dict.fromkeys(_devices(memory.devices)[1].tolist()))


def _memory(addresses: Int64, memory: RegisteredMemory) -> NDArray[np.str_]:
    """The kind of memory of each address."""
    kinds: NDArray[np.str_] = _devices(memory.devices)[1][memory.device_of(addresses)]
    return kinds


@lru_cache(maxsize=64)
def _devices(names: tuple[str, ...]) -> tuple[Int64, NDArray[np.str_]]:
    """Ordinals and kinds of memory of devices by their names."""
    devices = [parse_device(name) for name in names]
    return np.array([number for _, number in devices], np.int64), np.array(
        [MEMORY[kind] for kind, _ in devices]
    )
