"""Errors of traces."""

from __future__ import annotations

from kvd.errors import KvdError


class TraceError(KvdError, ValueError):
    """A trace that cannot be read or written. ``code`` is stable, ``hint`` the next step."""

    code = "KVD-TRACE"


class NotATrace(TraceError):
    """The file cannot be read, or is something else."""

    code = "KVD-TRACE-NONE"


class TraceVersionError(TraceError):
    """A trace of a schema that this version does not read."""

    code = "KVD-TRACE-VERSION"


class TraceCut(TraceError):
    """The trace ends before its last line."""

    code = "KVD-TRACE-CUT"


class BadTrace(TraceError):
    """A line that cannot be true: not of its shape, ids below zero or beyond the engine's memory."""

    code = "KVD-TRACE-BAD"


class TraceTooLarge(TraceError):
    """More than this version takes; found before it is read."""

    code = "KVD-TRACE-LARGE"
