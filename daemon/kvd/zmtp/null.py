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

    seals = False
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

    def seal(self, flags: int, body: bytes) -> tuple[bytes, bytes]:
        """Never asked: nothing is sealed."""
        raise NotImplementedError

    def unseal(self, body: bytes) -> tuple[int, bytes]:
        """Never asked: nothing is sealed."""
        raise NotImplementedError
