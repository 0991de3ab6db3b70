"""Where a worker stands in its host: CPUs, NUMA nodes, its GPU, network adapters. For people: it decides nothing."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.wire.limits import Count

MOST_ADAPTERS = 32
"""Network adapters that a worker tells of; hosts with eight GPUs have ten or so."""
MOST_NODES = 64
"""NUMA nodes that it tells of."""
LONGEST_PATH = 256
"""Characters of a device's path. Linux nests some eight bridges, each 13 characters long."""

_Name: TypeAlias = Annotated[str, Meta(max_length=64)]
_NumaNode: TypeAlias = Annotated[int, Meta(ge=-1, le=65_535)]


class PciDevice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A device on PCI.

    ``path`` is its way there from the host bridge, as in Linux's /sys/devices (``pci0000:00/0000:01:00.0``).
    ``numa``: -1 where the system does not say, as in many virtual machines.
    """

    name: _Name
    path: Annotated[str, Meta(max_length=LONGEST_PATH)]
    numa: _NumaNode = -1

    @property
    def address(self) -> str:
        """Its own address, the last part of the path."""
        return self.path.rsplit("/", 1)[-1]


class Locality(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker stands.

    ``cpus`` are those that it may run on, as the kernel writes them (``0-15,32-47``); ``numa`` the nodes of these.
    ``gpu`` has its KV memory: None for memory of the host, or where the driver does not say. ``adapters`` are the
    host's RDMA adapters, or where it has none its network cards.
    """

    cpus: Annotated[str, Meta(max_length=256)] = ""
    numa: Annotated[tuple[Count, ...], Meta(max_length=MOST_NODES)] = ()
    gpu: PciDevice | None = None
    adapters: Annotated[tuple[PciDevice, ...], Meta(max_length=MOST_ADAPTERS)] = ()
