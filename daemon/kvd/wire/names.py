"""Names that both ends of the wire must derive alike: socket paths, generations."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

SOCKET_NAME = "kvd.sock"
EVENTS_NAME = "events.sock"
DEFAULT_RUNTIME_DIR = "/run/kvd"
RUNTIME_DIR_VARIABLE = "KVD_RUNTIME_DIR"


def runtime_dir(given: str | None = None) -> Path:
    """The runtime directory.

    What is given, else ``$KVD_RUNTIME_DIR``, else /run/kvd, or a user's own when not root.
    """
    if given:
        return Path(given)
    if from_environment := os.environ.get(RUNTIME_DIR_VARIABLE):
        return Path(from_environment)
    if (
        os.geteuid() != 0
        and not os.access(DEFAULT_RUNTIME_DIR, os.X_OK)
        and (own := os.environ.get("XDG_RUNTIME_DIR"))
    ):
        return Path(own) / "kvd"
    return Path(DEFAULT_RUNTIME_DIR)


def socket_address(directory: Path) -> str:
    """The ZMQ address of the local socket in a runtime directory."""
    return f"ipc://{directory / SOCKET_NAME}"


def events_address(directory: Path) -> str:
    """The ZMQ address of the event socket in a runtime directory."""
    return f"ipc://{directory / EVENTS_NAME}"


def generation_of(incarnations: Iterable[str]) -> str:
    """An engine's generation: a digest of its workers' incarnations.

    So it is the same for every observer, survives a restart of kvd, and changes when any one worker is new.
    """
    return hashlib.sha256("\n".join(sorted(incarnations)).encode()).hexdigest()[:16]
