"""Opening a backend by name, importing only the one that was asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, cast

from kvd.backends.contract import Backend
from kvd.backends.errors import BackendUnavailable

_ADAPTERS: Mapping[str, str] = {
    "nixl": "kvd.backends.nixl.backend",
    "mooncake": "kvd.backends.mooncake.backend",
    "direct": "kvd.backends.direct.backend",
    "auto": "kvd.backends.auto.backend",
    "staged": "kvd.backends.staged.backend",
    "memory": "kvd.backends.memory",
}

# Distributions that provide an engine; any one of a row will do.
_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "nixl": ("nixl",),
    "mooncake": (
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine",
    ),
}


def open_backend(kind: str, name: str, options: Mapping[str, Any]) -> Backend:
    """A backend of ``kind``, one of `available`, for the worker ``name``; options are the adapter's own.

    Raises:
        BackendUnavailable: no such backend, or its engine is not installed here; the hint says what to install.
        BackendError: an option the adapter does not know.
    """
    if kind not in _ADAPTERS:
        raise BackendUnavailable(
            f"no backend {kind!r}: there are {', '.join(_ADAPTERS)}",
            backend=kind,
            hint=f"set the backend to one of {', '.join(_ADAPTERS)}",
        )
    adapter = importlib.import_module(_ADAPTERS[kind])
    make = cast("Callable[..., Backend]", adapter.open_backend)
    return make(name, options=options)


def available() -> dict[str, str]:
    """For each backend its engine's version, or why it cannot be used; from package metadata, without importing it."""
    return {kind: _state(kind) for kind in _ADAPTERS}


def _state(kind: str) -> str:
    names = _DISTRIBUTIONS.get(kind)
    if names is None:
        return "built in"
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return f"not installed: install {' or '.join(names)}"
