"""Errors of the processes that a demo or benchmark starts."""

from __future__ import annotations

from kvd.errors import KvdError


class EngineError(KvdError):
    """An engine of the demo cannot be used; the message ends with the last lines of its log."""


class EngineStartFailed(EngineError):
    """The engine ended before it was ready."""


class EngineTimeout(EngineError):
    """The engine is still starting."""


class EngineGone(EngineError):
    """The engine ended while something was expected from it."""


class DaemonStartFailed(KvdError):
    """A kvd of the demo ended, or did not answer, before it was ready."""


class WorkerFailed(KvdError):
    """A simulated worker did not start, ended, or could not do what it was told."""
