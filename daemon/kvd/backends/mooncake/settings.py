"""The options of the Mooncake backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvd.backends.errors import BackendError
from kvd.backends.mooncake.host import advertised_host, check_host
from kvd.backends.mooncake.library import FORCE_TCP, INFINIBAND, INTRANODE_NVLINK, NAME, Library
from kvd.geometry.model import Region

NVLINK = "nvlink"
PROTOCOLS = ("auto", "tcp", "rdma", NVLINK)
QUEUE = 1024
"""Transfers that Mooncake queues for one peer before it fails new ones (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What `open_backend` takes as options.

    ``protocol``: tcp, rdma, nvlink (CUDA IPC within a host, over NVLink where there is one), or auto for what suits the
    memory (`protocol_for`). ``device_name``: RDMA devices to use, comma separated, empty for all. ``host``: the
    address that peers are told, empty for one that is found (`advertised_host`). ``connect_timeout_s``: seconds
    that `Lane.add` waits for a peer to answer. ``in_flight``: pieces handed to Mooncake at a time for one peer.
    ``piece_bytes``: longer descriptors are cut into pieces of so many bytes. ``progress_timeout_s``: whole seconds
    without progress after which Mooncake itself fails a transfer, for the whole process; None for its 30.
    """

    protocol: str = "auto"
    device_name: str = ""
    host: str = ""
    connect_timeout_s: float = 5.0
    in_flight: int = 256
    piece_bytes: int = 1 << 20
    progress_timeout_s: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Settings from a mapping, ``host`` filled in.

        Raises:
            BackendError: an option that does not exist, or a value that one cannot have.
        """
        known = ", ".join(cls.__dataclass_fields__)
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            raise BackendError(
                f"unknown option {', '.join(unknown)} for mooncake; known are {known}", backend=NAME
            )
        settings = cls(**options)
        for name, value, wanted, fits in (
            ("protocol", settings.protocol, "auto, tcp, rdma or nvlink", settings.protocol in PROTOCOLS),
            ("device_name", settings.device_name, "text", isinstance(settings.device_name, str)),
            ("host", settings.host, "an address", isinstance(settings.host, str)),
            (
                "connect_timeout_s",
                settings.connect_timeout_s,
                "a number above 0",
                _number(settings.connect_timeout_s, above=0),
            ),
            (
                "in_flight",
                settings.in_flight,
                f"a whole number from 1 to {QUEUE}",
                _whole(settings.in_flight, 1, QUEUE),
            ),
            (
                "piece_bytes",
                settings.piece_bytes,
                "a whole number from 4096",
                _whole(settings.piece_bytes, 4096),
            ),
            (
                "progress_timeout_s",
                settings.progress_timeout_s,
                "none or a whole number from 1",
                settings.progress_timeout_s is None or _whole(settings.progress_timeout_s, 1),
            ),
        ):
            if not fits:
                raise BackendError(f"option {name} is {value!r}; it is {wanted}", backend=NAME)
        settings = settings if settings.host else replace(settings, host=advertised_host())
        check_host(settings.host)
        return settings


def protocol_for(
    regions: Sequence[Region], library: Library, environ: Mapping[str, str], infiniband: Path = INFINIBAND
) -> str:
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


def _number(value: object, *, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > above


def _whole(value: object, least: int, most: int | None = None) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= least
        and (most is None or value <= most)
    )
