"""The version of this kvctl."""

from __future__ import annotations

from importlib import metadata


def kvctl_version() -> str:
    """The version of the installed distribution; ``unknown`` in a source tree that was never installed."""
    try:
        return metadata.version("kvctl")
    except metadata.PackageNotFoundError:
        return "unknown"
