"""Loading Mooncake: what must be set before its first import and before an engine, and what its answers mean."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvd.backends.errors import BackendUnavailable
from kvd.backends.registry import ADAPTERS
from kvd.installed import installed_version

NAME = "mooncake"
INSTALL = (
    "install mooncake-transfer-engine-non-cuda==0.3.13.post1 (with CUDA 13 mooncake-transfer-engine-cuda13, with CUDA "
    "12 mooncake-transfer-engine) and the Debian packages libibverbs1, libnuma1 and libcurl4"
)
LOG = "Mooncake's own lines about it are on this process's stderr (MC_LOG_LEVEL=INFO for more)"

_log = logging.getLogger(__name__)

INFINIBAND = Path("/sys/class/infiniband")
# Another engine behind the same Python module, whose transfer numbers this adapter must not pass on.
_OTHER_ENGINE = ("MC_USE_TENT", "MC_USE_TEV1")
_environment = threading.Lock()
FORCE_TCP, INTRANODE_NVLINK = "MC_FORCE_TCP", "MC_INTRANODE_NVLINK"
"""What Mooncake obeys, whatever protocol it is told."""
_MEANS = {FORCE_TCP: "tcp", INTRANODE_NVLINK: "nvlink"}
_OTHER_PROTOCOLS = {"tcp": (), "rdma": (FORCE_TCP, INTRANODE_NVLINK), "nvlink": (FORCE_TCP,)}


@dataclass(frozen=True, slots=True)
class MooncakeLibrary:
    """Mooncake once loaded: its engine class, the installed release, whether it was built with CUDA.

    ``nvlink``: it can copy between processes of one host by CUDA IPC.
    """

    engine: Any
    version: str
    cuda: bool
    nvlink: bool = False


@lru_cache(maxsize=1)
def load() -> MooncakeLibrary:
    """Import Mooncake once, with its environment prepared.

    Raises:
        BackendUnavailable: not installed, its libraries don't load here, or the environment asks for its other engine.
    """
    prepare_environment(os.environ, loaded="mooncake.engine" in sys.modules)
    try:
        module = importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"Mooncake does not load: {error}", backend=NAME, hint=INSTALL) from error
    return MooncakeLibrary(
        module.TransferEngine,
        installed_version(ADAPTERS[NAME].distributions),
        bool(getattr(module, "SUPPORT_CUDA", False)),
        bool(getattr(module, "SUPPORT_INTRA_NVLINK", False)),
    )


def prepare_environment(environ: MutableMapping[str, str], *, loaded: bool = False) -> None:
    """Set what Mooncake reads when its library is loaded (``loaded``: it is already); what the user has set is kept.

    Raises:
        BackendUnavailable: the environment asks for Mooncake's other engine.
    """
    for name in _OTHER_ENGINE:
        if environ.get(name, "0") not in {"", "0"}:
            raise BackendUnavailable(
                f"{name}={environ[name]} selects another engine of Mooncake's, which this adapter does not know",
                backend=NAME,
                hint=f"unset {name}",
            )
    # Each engine, so each lane, tells eight lines of how it started.
    environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if "MC_LOG_DIR" in environ and not loaded:
        # The wheel of 0.3.13 initialises its log twice then, and its log ends the process for that.
        _log.warning(
            "MC_LOG_DIR=%s would end this process while Mooncake is imported: left out, its log stays on stderr",
            environ.pop("MC_LOG_DIR"),
        )


def told(protocol: str) -> str:
    """Mooncake's own word for a protocol; what it calls ``nvlink`` reaches other hosts and is not in every build."""
    return "nvlink_intra" if protocol == "nvlink" else protocol


@contextmanager
def engine_environment(
    protocol: str,
    progress_timeout_s: int | None,
    *,
    environ: MutableMapping[str, str] | None = None,
    infiniband: Path = INFINIBAND,
) -> Iterator[None]:
    """The environment in which an engine of ``protocol`` is to be made.

    Mooncake takes the protocol as a hint for its allocator only. What moves the bytes is CUDA IPC where
    MC_INTRANODE_NVLINK is set, else RDMA where it finds a device, else tcp; and tcp where MC_FORCE_TCP is set.

    Raises:
        BackendUnavailable: the user's own variables ask for another protocol, or rdma is wanted where there is no
            device.
    """
    environ = os.environ if environ is None else environ
    for name in _OTHER_PROTOCOLS[protocol]:
        if name in environ:
            raise BackendUnavailable(
                f"option protocol is {protocol} and {name} is set: Mooncake would use {_MEANS[name]}",
                backend=NAME,
                hint=f"unset {name}, or set protocol to {_MEANS[name]}",
            )
    wanted: dict[str, str | None] = {}
    if protocol == "tcp":
        wanted = {FORCE_TCP: "1", INTRANODE_NVLINK: None}
    elif protocol == "nvlink":
        wanted = {INTRANODE_NVLINK: "1"}
    elif not (infiniband.is_dir() and any(infiniband.iterdir())):
        raise BackendUnavailable(
            f"option protocol is {protocol} and {infiniband} is empty: Mooncake would use tcp without a word",
            backend=NAME,
            hint="set protocol to tcp, or load the driver of the RDMA device",
        )
    if progress_timeout_s is not None:
        for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
            # Read for each transfer, so it stays.
            environ[name] = str(progress_timeout_s)
    with _environment:
        before = {name: environ.get(name) for name in wanted}
        _update(environ, wanted)
        try:
            yield
        finally:
            _update(environ, before)


def _update(environ: MutableMapping[str, str], values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
