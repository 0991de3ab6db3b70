"""Versions of what is installed here, from package metadata, which imports nothing. Every floor may import this."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

UNINSTALLED = "0+source"
"""Stands for our own version in a source tree that was never installed: nothing is known of it."""


def installed_version(names: Iterable[str], missing: str = "unknown") -> str:
    """The version of the first of these distributions that is installed, else ``missing``."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return missing


def own_version() -> str:
    """The version of kvctl and kvd; `UNINSTALLED` in a source tree."""
    return installed_version(("kvctl",), UNINSTALLED)
