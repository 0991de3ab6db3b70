"""Errors of the command line, each with its exit code.

The messages say what happened and name the values; the hints say what to type next.
"""

from __future__ import annotations

from kvd.errors import KvdError

EXIT_CODES = (
    (0, "done"),
    (1, "a check failed or a difference was found"),
    (2, "wrong usage"),
    (3, "daemon unreachable"),
    (4, "peer unreachable or timeout"),
    (5, "refused for safety or policy"),
    (6, "not permitted"),
    (130, "interrupted"),
)
"""Every exit code and what it means, as it stands in ``kvctl --help``."""


class KvctlError(KvdError):
    """What ends a command early. ``code`` is stable; a subclass may be raised with the daemon's own code."""

    code = "KVD-CTL"
    exit_code = 1

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint)
        if code:
            self.code = code

    @property
    def told(self) -> str:
        """What a person reads: what is wrong, the next step, and the code that `kvctl explain` takes."""
        return f"{self.with_hint} [{self.code}]"


class CheckFailed(KvctlError):
    """A check failed or a difference was found."""

    code = "KVD-CTL-CHECK"
    exit_code = 1


class UsageError(KvctlError):
    """An argument, an environment variable or a configuration value is wrong."""

    code = "KVD-CTL-USAGE"
    exit_code = 2


class DaemonUnreachable(KvctlError):
    """No kvd answers at the address."""

    code = "KVD-CTL-UNREACHABLE"
    exit_code = 3


class PeerTimeout(KvctlError):
    """A peer is away, or something that was waited for did not happen in time."""

    code = "KVD-CTL-TIMEOUT"
    exit_code = 4


class HostsUnanswered(PeerTimeout):
    """Some hosts of a fleet did not answer; those that did are shown."""

    code = "KVD-CTL-UNANSWERED"


class RefusedError(KvctlError):
    """Refused for safety or policy."""

    code = "KVD-CTL-REFUSED"
    exit_code = 5


class NotPermitted(KvctlError):
    """This user may not."""

    code = "KVD-CTL-PERMISSION"
    exit_code = 6
