"""The options of the Mooncake backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvd.backends.mooncake.host import advertised_host, check_host
from kvd.backends.mooncake.library import FORCE_TCP, INFINIBAND, INTRANODE_NVLINK, NAME, MooncakeLibrary
from kvd.backends.options import read_options
from kvd.geometry.model import Region

NVLINK: Final = "nvlink"
Protocol = Literal["auto", "tcp", "rdma", "nvlink"]
QUEUE = 1024
"""Transfers that Mooncake queues for one peer before it fails new ones (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER)."""


class MooncakeOptions(msgspec.Struct, frozen=True):
    """What `open_backend` takes as options.

    ``protocol``: tcp, rdma, nvlink (CUDA IPC within a host, over NVLink where there is one), or auto for what suits the
    memory (`protocol_for`). ``device_name``: RDMA devices to use, comma separated, empty for all. ``host``: the
    address that peers are told, empty for one that is found (`advertised_host`). ``connect_timeout_s``: seconds
    that `Lane.add` waits for a peer to answer. ``in_flight``: pieces handed to Mooncake at a time for one peer.
    ``piece_bytes``: longer descriptors are cut into pieces of so many bytes. ``progress_timeout_s``: whole seconds
    without progress after which Mooncake itself fails a transfer, for the whole process; None for its 30.
    """

    protocol: Annotated[Protocol, Meta(description="auto, tcp, rdma or nvlink")] = "auto"
    device_name: Annotated[str, Meta(description="text")] = ""
    host: Annotated[str, Meta(description="an address")] = ""
    connect_timeout_s: Annotated[float, Meta(gt=0, description="a number above 0")] = 5.0
    in_flight: Annotated[int, Meta(ge=1, le=QUEUE, description=f"a whole number from 1 to {QUEUE}")] = 256
    piece_bytes: Annotated[int, Meta(ge=4096, description="a whole number from 4096")] = 1 << 20
    progress_timeout_s: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="none or a whole number from 1")
    ] = None


def mooncake_options(given: Mapping[str, Any]) -> MooncakeOptions:
    """The options, ``host`` filled in.

    Raises:
        BackendError: an option that does not exist, or a value that one cannot have.
    """
    found = read_options(MooncakeOptions, given, backend=NAME)
    found = found if found.host else replace(found, host=advertised_host())
    check_host(found.host)
    return found


def protocol_for(
    regions: Sequence[Region],
    library: MooncakeLibrary,
    environ: Mapping[str, str],
    infiniband: Path = INFINIBAND,
) -> Protocol:
    """What ``auto`` means over ``regions``, which are registered with an engine of that protocol.

    Host memory goes by tcp, unless rdma is asked for. GPU memory goes by what the environment asks for, else by RDMA
    where there is a device, else by CUDA IPC where Mooncake was built with it, else by tcp, which is slow.
    """
    if all(region.device == "cpu" for region in regions) or FORCE_TCP in environ:
        return "tcp"
    if library.nvlink and INTRANODE_NVLINK in environ:
        return NVLINK
    if infiniband.is_dir() and any(infiniband.iterdir()):
        return "rdma"
    return NVLINK if library.nvlink else "tcp"
