"""Errors of the daemon."""

from __future__ import annotations

from kvd.errors import KvdError
from kvd.shown import brief
from kvd.wire.codes import OthersCode, RefusalCode
from kvd.wire.errors import Malformed, TooLarge, WireError
from kvd.wire.reply import RefusalFactor, Refused, refusal


class ServiceError(KvdError):
    """Something that the daemon cannot do. ``hint`` is the next step for a person, or empty."""


class ConfigError(ServiceError):
    """The daemon cannot be started, or reloaded, with these settings or flags."""

    code = "KVD-SETTINGS"


class StartError(ServiceError):
    """A socket, a lock or a directory cannot be had."""

    code = "KVD-START"


class PeerAway(ServiceError):
    """Another kvd is down, or did not answer in time."""


class RequestRefused(ServiceError):
    """Raised by a handler to refuse. Codes are stable; the message names both values that disagree.

    ``final``: sending it again will not help.
    """

    def __init__(
        self,
        code: RefusalCode | OthersCode,
        message: str,
        *,
        hint: str = "",
        factors: tuple[RefusalFactor, ...] = (),
        final: bool = False,
    ) -> None:
        super().__init__(brief(message), hint=hint)
        self.code: RefusalCode | OthersCode = code
        self.factors, self.final = factors, final

    @classmethod
    def passed_on(cls, refused: Refused, who: str = "") -> RequestRefused:
        """What somebody else refused, to be refused in the same words; ``who`` is named before them."""
        message = f"{who}: {refused.message}" if who else refused.message
        return cls(
            OthersCode(refused.code), message, hint=refused.hint, factors=refused.factors, final=refused.final
        )

    @property
    def refused(self) -> Refused:
        """What is sent back."""
        return refusal(self.code, self.message, hint=self.hint, factors=self.factors, final=self.final)


def unreadable(error: WireError) -> Refused:
    """What is sent back for a frame that could not be taken. One of another version may be taken by a later kvd."""
    if isinstance(error, TooLarge):
        return refusal(error.code, error.message, hint="send less at a time", final=True)
    hint = "both sides should be of one version"
    return refusal(error.code, error.message, hint=hint, final=isinstance(error, Malformed))


LEDGER_CODE: RefusalCode = "KVD-LEDGER"


class LedgerError(RequestRefused):
    """The ledger cannot be opened, written or read now; the message keeps SQLite's own words.

    It is refused as ``KVD-LEDGER``, and never for good: workers keep their records and send them again.
    """

    def __init__(
        self, message: str, *, hint: str = "see the disk of kvd's state directory, and kvd's log"
    ) -> None:
        super().__init__(LEDGER_CODE, message, hint=hint)
