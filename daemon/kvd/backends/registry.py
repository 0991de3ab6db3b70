"""Opening a backend by name, importing only the one that was asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvd.backends.errors import BackendError, BackendUnavailable, ForeignWindow
from kvd.installed import installed_version

if TYPE_CHECKING:
    from kvd.backends.contract import Backend
    from kvd.topology.rate import Mover


class Adapter(NamedTuple):
    """Where a backend is opened, and what kvctl and the connector need to know of it without opening it.

    Where peers map host memory of memfds the module has a ``maps_memory(options)``, as options may say no. Where peers
    may write it has a ``check_window(card, window)``.
    """

    module: str
    distributions: tuple[str, ...] = ()
    """Any one of them provides its engine; none where it is ours."""
    measured: bool = False
    """It moves bytes between processes by itself, so kvctl measures it."""
    transports: tuple[str, str] = ("", "")
    """What moves bytes of host memory and of a device's; empty where only its log tells or nothing does."""
    host_option: str = ""
    """Its option that says at which address peers reach it."""
    is_engine: bool = True
    """It may be the one behind auto or staged."""
    one_host: bool = False
    """Bytes do not leave their host."""
    reads_only: bool = False
    """Its lanes refuse to write."""
    staging: bool = False
    """Its backends are `StagingBackend`: blocks of a prefill are copied before they are offered."""
    through_host: bool = False
    """It moves bytes between GPUs by way of the host, by design."""
    cure: str = ""
    """What to do where bytes between GPUs are slow; empty where its page says it."""
    offered: bool = True
    """People may choose it; else it is for tests."""


ADAPTERS: dict[str, Adapter] = {
    "nixl": Adapter(
        "kvd.backends.nixl.backend",
        ("nixl",),
        measured=True,
        cure=(
            "within a host UCX needs CUDA IPC: UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on, no UCX_TLS or one with cuda, and"
            " both engines in one IPC and PID namespace; between hosts RDMA that reaches GPU memory (nvidia-peermem or"
            " dma-buf). UCX_LOG_LEVEL=info names the transports"
        ),
    ),
    "mooncake": Adapter(
        "kvd.backends.mooncake.backend",
        (
            "mooncake-transfer-engine-non-cuda",
            "mooncake-transfer-engine-cuda13",
            "mooncake-transfer-engine",
        ),
        measured=True,
        transports=("tcp", ""),  # on a device it chooses for itself, and does not tell
        host_option="host",
        cure="set the option protocol of the backend to nvlink within a host, to rdma between hosts",
    ),
    "direct": Adapter(
        "kvd.backends.direct.backend",
        measured=True,
        transports=("process_vm_readv", "CUDA IPC"),
        is_engine=False,
        one_host=True,
        reads_only=True,
    ),
    "auto": Adapter("kvd.backends.auto.backend", is_engine=False, reads_only=True),
    "staged": Adapter("kvd.backends.staged.backend", reads_only=True, staging=True, through_host=True),
    "memory": Adapter("kvd.backends.memory", one_host=True, offered=False),
}
"""One entry for each backend. Its module has an ``open_backend(name, options=...)``."""

MEASURED = tuple(kind for kind, adapter in ADAPTERS.items() if adapter.measured)
OFFERED = tuple(kind for kind, adapter in ADAPTERS.items() if adapter.offered)


def stages(kind: str) -> bool:
    """Whether what peers are to read is copied for them first."""
    return kind in ADAPTERS and ADAPTERS[kind].staging


def mover(kind: str) -> Mover:
    """How fast a backend is between GPUs, under its name; a name of which nothing is known is any other's."""
    from kvd.topology.rate import Mover  # numpy comes with it, and a completion has no time for that

    known = ADAPTERS.get(kind, Adapter(""))
    return Mover(kind, through_host=known.through_host, cure=known.cure)


def open_backend(kind: str, name: str, options: Mapping[str, Any]) -> Backend:
    """A backend of ``kind``, one of `available`, for the worker ``name``; options are the adapter's own.

    Raises:
        BackendUnavailable: no such backend, or its engine is not installed here; the hint says what to install.
        BackendError: an option the adapter does not know.
    """
    make = cast("Callable[..., Backend]", _module(kind).open_backend)
    return make(name, options=options)


def maps_memory(kind: str, options: Mapping[str, Any]) -> bool:
    """Whether peers map the host memory of a backend with these options, which has to be a memfd's for that.

    Raises:
        BackendUnavailable: no such backend.
        BackendError: an option the adapter does not know.
    """
    asks = getattr(_module(kind), "maps_memory", None)
    return asks is not None and bool(asks(options))


def check_window(kind: str, card: bytes, window: bytes) -> None:
    """Refuse a window that is not of the worker whose ``card`` has this metadata; both are of backends of that kind.

    Raises:
        ForeignWindow: so it is, or nobody writes to that kind of backend.
        PeerMetadataError: one of the two cannot be read.
    """
    check = getattr(_module(kind), "check_window", None)
    if check is None:
        raise ForeignWindow(f"a window was announced, and nobody writes to backend {kind!r}", backend=kind)
    check(card, window)


def check_engine(kind: str, behind: str) -> None:
    """Refuse a backend that is no transfer engine as the one ``behind`` another.

    Raises:
        BackendError: so it is.
    """
    if kind == behind or (kind in ADAPTERS and not ADAPTERS[kind].is_engine):
        raise BackendError(f"option engine is {kind!r}, which is no transfer engine", backend=behind)


def available() -> dict[str, str]:
    """For each backend its engine's version, or why it cannot be used; from package metadata, without importing it."""
    return {kind: _state(kind) for kind in ADAPTERS}


def _module(kind: str) -> ModuleType:
    if kind not in ADAPTERS:
        raise BackendUnavailable(
            f"no backend {kind!r}: there are {', '.join(ADAPTERS)}",
            backend=kind,
            hint=f"set the backend to one of {', '.join(ADAPTERS)}",
        )
    return importlib.import_module(ADAPTERS[kind].module)


def _state(kind: str) -> str:
    names = ADAPTERS[kind].distributions
    if not names:
        return "built in"
    return installed_version(names, f"not installed: install {' or '.join(names)}")
