"""Opening a backend by name, importing only the one that was asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from kvd.backends.contract import Backend
from kvd.backends.errors import BackendUnavailable
from kvd.installed import installed_version


class Adapter(NamedTuple):
    """Where a backend is opened, and the distributions of which any one provides its engine; none where it is ours."""

    module: str
    distributions: tuple[str, ...] = ()


ADAPTERS: dict[str, Adapter] = {
    "nixl": Adapter("kvd.backends.nixl.backend", ("nixl",)),
    "mooncake": Adapter(
        "kvd.backends.mooncake.backend",
        (
            "mooncake-transfer-engine-non-cuda",
            "mooncake-transfer-engine-cuda13",
            "mooncake-transfer-engine",
        ),
    ),
    "direct": Adapter("kvd.backends.direct.backend"),
    "auto": Adapter("kvd.backends.auto.backend"),
    "staged": Adapter("kvd.backends.staged.backend"),
    "memory": Adapter("kvd.backends.memory"),
}
"""One line for each backend. Its module has an ``open_backend(name, options=...)``."""


def open_backend(kind: str, name: str, options: Mapping[str, Any]) -> Backend:
    """A backend of ``kind``, one of `available`, for the worker ``name``; options are the adapter's own.

    Raises:
        BackendUnavailable: no such backend, or its engine is not installed here; the hint says what to install.
        BackendError: an option the adapter does not know.
    """
    if kind not in ADAPTERS:
        raise BackendUnavailable(
            f"no backend {kind!r}: there are {', '.join(ADAPTERS)}",
            backend=kind,
            hint=f"set the backend to one of {', '.join(ADAPTERS)}",
        )
    adapter = importlib.import_module(ADAPTERS[kind].module)
    make = cast("Callable[..., Backend]", adapter.open_backend)
    return make(name, options=options)


def available() -> dict[str, str]:
    """For each backend its engine's version, or why it cannot be used; from package metadata, without importing it."""
    return {kind: _state(kind) for kind in ADAPTERS}


def _state(kind: str) -> str:
    names = ADAPTERS[kind].distributions
    if not names:
        return "built in"
    return installed_version(names, f"not installed: install {' or '.join(names)}")
