"""What is wrong with a peer's bytes."""

from __future__ import annotations

from typing import Literal

from kvd.errors import KvdError

ZmtpErrorKind = Literal["greeting", "protocol", "too_large", "not_authorised", "other_key"]


class ZmtpError(KvdError):
    """The connection cannot go on; ``kind`` is for counters.

    greeting         no ZMTP, one older than 3, or another mechanism than ours
    protocol         a frame, command or box that the protocol does not allow here
    too_large        more bytes, frames or items than the limits allow; the message names both
    not_authorised   CURVE: the server does not know the client's key
    other_key        CURVE: the client expects another key of the server, or sends rubbish of that shape

    ``farewell`` is the body of a command that tells the peer why, or empty. ``key`` is the one that is not authorised.
    """

    code = "KVD-ZMTP"

    def __init__(self, kind: ZmtpErrorKind, message: str, farewell: bytes = b"", key: bytes = b"") -> None:
        super().__init__(message)
        self.kind: ZmtpErrorKind = kind
        self.farewell, self.key = farewell, key
