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


class Adapter(NamedTuple):
    """Where a backend is opened, and what kvctl and the connector need to know of it without opening it.

    ``distributions``: any one of them provides its engine; none where it is ours. ``measured``: it moves bytes between
    processes by itself, so kvctl measures it. ``transports``: what moves bytes of host memory and of a device's, empty
    where only its log tells or nothing does. ``host_option``: its option that says at which address peers reach it.
    ``is_engine``: it may be the one behind auto or staged. Where peers map host memory of memfds the module has a
    ``maps_memory(options)``, as options may say no. Where peers may write it has a ``check_window(card, window)``.
    """

    module: str
    distributions: tuple[str, ...] = ()
    measured: bool = False
    transports: tuple[str, str] = ("", "")
    host_option: str = ""
    is_engine: bool = True


ADAPTERS: dict[str, Adapter] = {
    "nixl": Adapter("kvd.backends.nixl.backend", ("nixl",), measured=True),
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
    ),
    "direct": Adapter(
        "kvd.backends.direct.backend",
        measured=True,
        transports=("process_vm_readv", "CUDA IPC"),
        is_engine=False,
    ),
    "auto": Adapter("kvd.backends.auto.backend", is_engine=False),
    "staged": Adapter("kvd.backends.staged.backend"),
    "memory": Adapter("kvd.backends.memory"),
}
"""One line for each backend. Its module has an ``open_backend(name, options=...)``."""

MEASURED = tuple(kind for kind, adapter in ADAPTERS.items() if adapter.measured)


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
