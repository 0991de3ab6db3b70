"""Errors of the demo's engines.

EngineError
├── EngineStartFailed   the engine died or refused its configuration before it was ready
├── EngineTimeout       the engine is not ready in time
└── EngineGone          the engine died while a request was in flight, or takes no more commands
DaemonStartFailed       a kvd of the demo did not come up
WorkerFailed            a simulated worker did not start, ended, or could not do what it was told
"""


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
