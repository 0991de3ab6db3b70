"""Errors of the wire; a code and a message can be sent back as `kvd.wire.reply.Refused`."""

from __future__ import annotations

from kvd.errors import KvdError
from kvd.wire.codes import RefusalCode


class WireError(KvdError):
    """A frame that cannot be taken. ``correlation`` is the sender's id where it could be read, else 0."""

    code: RefusalCode = "KVD-WIRE"

    def __init__(self, message: str, correlation: int = 0) -> None:
        super().__init__(message)
        self.correlation = correlation


class Malformed(WireError):
    """Not msgpack, truncated, or not of the expected shape."""

    code = "KVD-WIRE-MALFORMED"


class VersionMismatch(WireError):
    """Another wire version; the message names both."""

    code = "KVD-WIRE-VERSION"


class UnknownMessage(WireError):
    """A kind of message that this version does not have; the message names it."""

    code = "KVD-WIRE-UNKNOWN"


class TooLarge(WireError):
    """More bytes than a message of its kind may have; the message names both numbers."""

    code = "KVD-TOO-LARGE"


class BadCard(WireError):
    """Parts that do not make a card of an engine."""

    code = "KVD-PEER-CARD"
