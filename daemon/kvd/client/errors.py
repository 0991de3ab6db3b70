"""Errors of the client side of the wire."""

from __future__ import annotations

from kvd.errors import KvdError
from kvd.wire.reply import RefusalFactor, Refused


class ClientError(KvdError):
    """A request to kvd that got no good answer. ``hint`` is the next step for a person, or empty."""

    code = "KVD-CLIENT"


class Unreachable(ClientError):
    """No kvd answers behind the socket."""

    code = "KVD-UNREACHABLE"


class SocketNotPermitted(Unreachable):
    """The operating system does not let this user near the socket, whoever may listen there."""

    code = "KVD-NOT-PERMITTED"


class KeyNotTrusted(Unreachable):
    """A kvd on another host does not let this key in, or has another key than the one that is expected."""

    code = "KVD-KEY-NOT-TRUSTED"


class TimedOut(ClientError):
    """No answer within the time given."""

    code = "KVD-TIMEOUT"


class Unencodable(ClientError):
    """The message holds what the wire cannot carry, or could not be made: it was not sent."""

    code = "KVD-UNENCODABLE"


class ProtocolError(ClientError):
    """The answer is of a kind, a version or a shape that this side cannot take."""

    code = "KVD-PROTOCOL"


class AnswerTooLarge(ClientError):
    """An answer, over all its pages, is beyond a limit of this side: no kvd that is well gives such a one."""

    code = "KVD-ANSWER-LIMIT"


class RefusedByDaemon(ClientError):
    """kvd refused. ``code`` is the daemon's, ``factors`` are what it compared, where it compared anything."""

    def __init__(self, refusal: Refused, of: str = "") -> None:
        """``of`` is who refused, where the message alone would not say it."""
        super().__init__(f"{of}: {refusal.message}" if of else refusal.message, hint=refusal.hint)
        self.code = refusal.code
        self.factors: tuple[RefusalFactor, ...] = refusal.factors
        self.refusal = refusal
