"""Errors of the processes that a demo or benchmark starts."""


class EngineError(RuntimeError):
    """An engine of the demo cannot be used; the message ends with the last lines of its log."""


class EngineStartFailed(EngineError):
    """The engine ended before it was ready."""


class EngineTimeout(EngineError):
    """The engine is still starting."""


class EngineGone(EngineError):
    """The engine ended while something was expected from it."""


class DaemonStartFailed(RuntimeError):
    """A kvd of the demo ended, or did not answer, before it was ready."""


class WorkerFailed(RuntimeError):
    """A simulated worker did not start, ended, or could not do what it was told."""
