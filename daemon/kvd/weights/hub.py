"""Where models of Hugging Face's hub lie on this host. Nothing is fetched, and the library is not needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from kvd.weights.errors import WeightsUnreadable


def hub_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The hub's cache of this process, as the library documents its variables."""
    for name, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if place := environment.get(name):
            return Path(place).expanduser() / below
    return Path("~/.cache/huggingface/hub").expanduser()


def hub_snapshot(cache: Path, name: str, revision: str = "main") -> Path:
    """The folder that the cache has of a model or adapter. Raises `WeightsUnreadable` where it has none.

    The layout is Hugging Face's: ``models--ORG--NAME`` with ``refs/REVISION``, which names a folder of ``snapshots``.
    """
    held = cache / f"models--{name.replace('/', '--')}"
    with contextlib.suppress(OSError, ValueError):
        reference = held / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else revision
        if (found := held / "snapshots" / commit).is_dir():
            return found
    raise WeightsUnreadable(
        f"the model is no folder here, and the hub's cache has no snapshot of revision {revision}"
    )
