"""How near a worker's GPU or memory is to a network adapter or another GPU, in the words of `nvidia-smi topo -m`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from kvd.wire.locality import Locality, PciDevice

Nearness: TypeAlias = Literal["X", "PIX", "PXB", "PHB", "NODE", "SYS"]
ORDER: tuple[Nearness, ...] = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")
"""From the nearest on: itself, one PCIe switch, several, the CPU's host bridge, one NUMA node, beyond it."""
_SAME_SWITCH = 2
"""Parts of a path below the switch that two devices share: its port and the device."""


def between(one: PciDevice, other: PciDevice) -> Nearness:
    """How two devices of one host are connected, NVLink aside."""
    if one.path == other.path:
        return "X"
    here, there = one.path.split("/"), other.path.split("/")
    shared = next(
        (at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there))
    )
    if shared == 0:
        return "NODE" if one.numa == other.numa else "SYS"
    if shared == 1:
        return "PHB"
    return "PIX" if max(len(here), len(there)) - shared <= _SAME_SWITCH else "PXB"


def to_adapter(worker: Locality, adapter: PciDevice) -> Nearness:
    """How near an adapter is to a worker's KV memory: of the host's memory its NUMA node decides."""
    if worker.gpu is not None:
        return between(worker.gpu, adapter)
    return "NODE" if adapter.numa in (-1, *worker.numa) else "SYS"


def between_workers(one: Locality, other: Locality) -> Nearness:
    """How near the KV memories of two workers of one host are."""
    if one.gpu is not None and other.gpu is not None:
        return between(one.gpu, other.gpu)
    nodes = [(worker.gpu.numa,) if worker.gpu is not None else worker.numa for worker in (one, other)]
    return "NODE" if not set(nodes[0]).isdisjoint(nodes[1]) else "SYS"
