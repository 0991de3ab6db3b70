"""The mechanism NULL: both sides say what they are, nothing is sealed."""

from __future__ import annotations

from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.frames import SHOWN, named, refusal, taken_apart


class Null:
    """For sockets that only this host reaches."""

    name = "NULL"
    as_server = False

    def handshake(self, metadata: bytes) -> NullHandshake:
        """A new connection's."""
        return NullHandshake(metadata)


class NullHandshake:
    """One READY each."""

    boxes = None
    key = b""

    def __init__(self, metadata: bytes) -> None:
        self._ours = metadata

    def first(self) -> bytes:
        """Our READY, which waits for none of the peer's."""
        return named(b"READY", self._ours)

    def take(self, body: bytes) -> tuple[bytes, bytes | None]:
        """The peer's READY. Raises `ZmtpError`."""
        name, data = taken_apart(body)
        if name == b"ERROR":
            raise refusal(data)
        if name != b"READY":
            raise ZmtpError("protocol", f"expected READY, the peer sends the command {name[:SHOWN]!r}")
        return b"", data
