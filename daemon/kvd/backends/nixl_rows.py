"""A post's rows as NIXL takes them: one table a side, of one kind of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvd.backends.errors import TransferRefused
from kvd.backends.nixl_agent import MEMORY
from kvd.backends.nixl_library import NAME
from kvd.backends.spans import Spans, parse_device
from kvd.topology.descriptors import Descriptors, Int64


@dataclass(frozen=True, slots=True)
class Part:
    """Rows (address, bytes, device ordinal) of both sides of a post, each side in one kind of memory."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    local_memory: str
    remote_memory: str


def checked(descriptors: Descriptors) -> Descriptors:
    """The descriptors with rows of no bytes left out."""
    lengths = {len(descriptors.local), len(descriptors.remote), len(descriptors.length)}
    if len(lengths) > 1:
        raise TransferRefused(
            f"descriptor columns differ in length: {len(descriptors.local)} local, {len(descriptors.remote)} remote, "
            f"{len(descriptors.length)} lengths",
            backend=NAME,
        )
    if not len(descriptors):
        return descriptors
    least = min(int(c.min()) for c in (descriptors.local, descriptors.remote, descriptors.length))
    if least < 0:
        raise TransferRefused(
            f"a descriptor holds {least}; addresses and lengths are not negative", backend=NAME
        )
    keep = descriptors.length > 0
    if keep.all():
        return descriptors
    return Descriptors(descriptors.local[keep], descriptors.remote[keep], descriptors.length[keep])


def parts(rows: Descriptors, local: Spans, remote: Spans) -> Iterator[Part]:
    """Split by kind of memory: one list of NIXL's is all DRAM or all VRAM, on whatever devices."""
    if not len(rows):
        return
    here, here_memory = side(rows.local, rows.length, local)
    there, there_memory = side(rows.remote, rows.length, remote)
    pairs = [(a, b) for a in memories(local) for b in memories(remote)]
    for a, b in pairs:
        if len(pairs) == 1:
            yield Part(here, there, a, b)
        elif (chosen := (here_memory == a) & (there_memory == b)).any():
            yield Part(here[chosen], there[chosen], a, b)


def side(addresses: Int64, lengths: Int64, spans: Spans) -> tuple[NDArray[np.uint64], NDArray[np.str_]]:
    """One side's rows (address, bytes, device ordinal), shape (n, 3), and the kind of memory of each."""
    devices = [parse_device(device) for device in spans.devices]
    ordinals = np.array([ordinal for _, ordinal in devices], np.int64)
    kinds = np.array([MEMORY[kind] for kind, _ in devices])
    table = np.empty((len(addresses), 3), np.uint64)
    table[:, 0], table[:, 1] = addresses, lengths
    if len(devices) == 1:
        table[:, 2] = ordinals[0]
        return table, np.broadcast_to(kinds, len(addresses))
    where = spans.locate(addresses)
    table[:, 2] = ordinals[where]
    return table, kinds[where]


def memories(spans: Spans) -> list[str]:
    """NIXL's names of the kinds of memory that a worker has."""
    return list(dict.fromkeys(MEMORY[parse_device(device)[0]] for device in spans.devices))
