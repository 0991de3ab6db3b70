"""Errors of the backends."""

from __future__ import annotations

from kvd.errors import KvdError


class BackendError(KvdError):
    """A transfer engine said no. ``backend`` names it; the message keeps the engine's own words."""

    code = "KVD-BACKEND"

    def __init__(self, message: str, *, backend: str = "", hint: str = "") -> None:
        super().__init__(message, hint)
        self.backend = backend


class BackendUnavailable(BackendError):
    """Not installed, or does not load on this machine."""

    code = "KVD-BACKEND-UNAVAILABLE"


class RegistrationError(BackendError):
    """Memory could not be registered."""

    code = "KVD-BACKEND-REGISTER"


class PeerMetadataError(BackendError):
    """A peer's metadata is stale, or of another backend or version."""

    code = "KVD-BACKEND-METADATA"


class ForeignWindow(BackendError):
    """What was announced to be written to is not the memory of the worker that announced it."""

    code = "KVD-BACKEND-LANDING"


class WorkerUnreachable(BackendError):
    """The peer is gone or cannot be reached."""

    code = "KVD-BACKEND-UNREACHABLE"


class TransferRefused(BackendError):
    """The engine would not start the transfer: unregistered memory, a bad descriptor, a full queue."""

    code = "KVD-BACKEND-REFUSED"
