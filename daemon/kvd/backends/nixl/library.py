"""Loading NIXL: what must be set before its first import, where its talk goes, what its errors mean."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kvd.backends.errors import (
    BackendError,
    BackendUnavailable,
    PeerMetadataError,
    TransferRefused,
    WorkerUnreachable,
)
from kvd.geometry.model import Region
from kvd.installed import installed_version

NAME = "nixl"
INSTALL = "install nixl==1.5.1 (it needs numpy; without CUDA use --no-deps with nixl-cu12 and nixl-cu13)"

_log = logging.getLogger(__name__)

INFINIBAND = Path("/sys/class/infiniband")
"""Holds a link for each RDMA device."""

CUDA_IPC_READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
NVIDIA = Path("/dev/nvidiactl")
"""Is there where a process may use NVIDIA's GPUs."""

PROGRESS_DELAY_US = 10_000
"""Longest sleep of a progress thread, which wakes when something comes; NIXL's Python sets 0, and then it spins."""

_SOFTWARE = frozenset({"tcp", "self", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"})

# NIXL's exceptions carry one word each; these are the ones that mean something better than "no".
_MEANINGS: Mapping[str, tuple[type[BackendError], str]] = {
    "nixlRemoteDisconnectError": (WorkerUnreachable, "the peer's process has ended or its network is gone"),
    "nixlNotFoundError": (
        TransferRefused,
        "an address lies outside the memory registered here or at the peer, or the peer is not known to this lane",
    ),
    "nixlMismatchError": (PeerMetadataError, "the peer runs another NIXL, or its metadata is damaged"),
    "nixlNotSupportedError": (TransferRefused, "no transport that both sides have can do this"),
}


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """NIXL once loaded. ``errors`` is what its calls may raise; ``version`` the installed release."""

    agent: Any
    config: Any
    errors: tuple[type[Exception], ...]
    version: str


@lru_cache(maxsize=1)
def load() -> NixlLibrary:
    """Import NIXL once, with its environment prepared and its log off stdout.

    Raises:
        BackendUnavailable: not installed, or its libraries don't load here.
    """
    if NAME not in sys.modules:
        prepare_environment(os.environ)
    prefer_cuda_ipc(os.environ)
    logger = logging.getLogger(NAME)
    # While it is imported NIXL attaches a handler on stdout and may at once write to it; stdout belongs to whoever
    # prints data there.
    logger.addFilter(_nothing)
    try:
        api = importlib.import_module("nixl._api")
        bindings = importlib.import_module("nixl._bindings")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"NIXL does not load: {error}", backend=NAME, hint=INSTALL) from error
    finally:
        logger.removeFilter(_nothing)
        _off_stdout(logger)
    errors = tuple(
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    )
    # RuntimeError and ValueError are what pybind makes of C++ exceptions that NIXL did not expect itself.
    agent = partial(_patient, api.nixl_agent)
    return NixlLibrary(
        agent, api.nixl_agent_config, (*errors, RuntimeError, ValueError), installed_version((NAME,))
    )


def prepare_environment(environ: MutableMapping[str, str], infiniband: Path = INFINIBAND) -> None:
    """Set what UCX reads once, when its library is loaded; what the user has set is kept, but for a missing tcp."""
    # libibverbs1 brings a second copy of libnl into the process, and every process that made a UCX context with the ib
    # module then dies with SIGSEGV at exit. Where there is no InfiniBand device the module is of no use anyway.
    if "UCX_MODULES" not in environ and not (infiniband.is_dir() and any(infiniband.iterdir())):
        environ["UCX_MODULES"] = "^ib"
    # UCX's default is stdout, on which it prints connection errors.
    environ.setdefault("UCX_LOG_FILE", "stderr")
    transports = environ.get("UCX_TLS")
    if transports is not None and (kept := _with_tcp(transports)) != transports:
        # Shared memory alone cannot connect: agents exchange their first messages over tcp, as does every fallback.
        _log.warning("UCX_TLS=%s leaves out tcp, which NIXL needs to connect: using %s", transports, kept)
        environ["UCX_TLS"] = kept


def prefer_cuda_ipc(environ: MutableMapping[str, str], nvidia: Path = NVIDIA) -> None:
    """Set, where there are GPUs, what UCX reads for each agent; what the user has set is kept.

    Left to itself UCX reads a GPU's memory over tcp, at 0.5 GB/s, where it sees no NVLink: two processes on one GPU,
    GPUs joined by PCIe, a container without nvml.
    """
    if nvidia.exists() and CUDA_IPC_READS not in environ:
        environ[CUDA_IPC_READS] = "on"
        _log.info("set %s=on: UCX may else read GPU memory over tcp", CUDA_IPC_READS)


def software_only(
    environ: Mapping[str, str], regions: Sequence[Region], infiniband: Path = INFINIBAND
) -> bool:
    """Whether bytes can reach ``regions`` only through calls into NIXL, never by a device's own doing.

    So it is for host memory where there is no RDMA device, or where UCX_TLS names nothing but software transports.
    """
    if any(region.device != "cpu" for region in regions):
        return False
    named = {name.strip() for name in environ.get("UCX_TLS", "").split(",") if name.strip()}
    if named and named <= _SOFTWARE:
        return True
    return not (infiniband.is_dir() and any(infiniband.iterdir()))


def translate(error: Exception, doing: str) -> BackendError:
    """The typed error for one of NIXL's, with NIXL's own words and without its traceback.

    The traceback is dropped on purpose: its frames hold the agent, and an agent that is held cannot be destroyed.
    """
    name = type(error).__name__
    kind, hint = _MEANINGS.get(name, (TransferRefused, ""))
    return kind(f"{doing}: {name}: {error}", backend=NAME, hint=hint)


def _patient(make: Callable[[str, Any], Any], name: str, config: Any) -> Any:
    """An agent whose progress thread, if it has one, sleeps while nothing comes.

    The wrapper makes the underlying configuration itself and writes 0 into it. For the time of that call it gets a
    class that keeps our value; agents that somebody else makes at this very moment sleep too, which does them no harm.
    """
    bindings = vars(sys.modules[make.__module__]).get("nixlBind")
    theirs = getattr(bindings, "nixlAgentConfig", None)
    if theirs is None or not hasattr(theirs, "pthrDelay"):
        return make(name, config)

    def keep(self: Any, attribute: str, value: Any) -> None:
        theirs.__setattr__(self, attribute, PROGRESS_DELAY_US if attribute == "pthrDelay" else value)

    with _making:
        setattr(bindings, "nixlAgentConfig", type("Patient", (theirs,), {"__setattr__": keep}))  # noqa: B010
        try:
            return make(name, config)
        finally:
            setattr(bindings, "nixlAgentConfig", theirs)  # noqa: B010


_making = threading.Lock()


def _with_tcp(transports: str) -> str:
    names = [name.strip() for name in transports.removeprefix("^").split(",") if name.strip()]
    if transports.startswith("^"):
        kept = [name for name in names if name != "tcp"]
        return "^" + ",".join(kept) if kept else "all"
    return transports if {"tcp", "all"} & set(names) else ",".join([*names, "tcp"])


def _off_stdout(logger: logging.Logger) -> None:
    for handler in list(logger.handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream in {sys.stdout, sys.__stdout__}:
            logger.removeHandler(handler)
    # "Initialized agent" at INFO for every lane is noise at a level people keep on.
    if not os.environ.get("NIXL_LOG_LEVEL"):
        logger.setLevel(logging.WARNING)
    logger.propagate = True


def _nothing(_: logging.LogRecord) -> bool:
    return False
