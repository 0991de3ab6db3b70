"""The first 64 bytes of a connection: version and security mechanism."""

from __future__ import annotations

from kvd.zmtp.errors import ZmtpError

BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x01"
_MECHANISM = slice(12, 32)


def greeting(mechanism: str, *, as_server: bool) -> bytes:
    """Ours."""
    return (_SIGNATURE + _VERSION + mechanism.encode().ljust(20, b"\0") + bytes([as_server])).ljust(
        BYTES, b"\0"
    )


def check(data: bytes, mechanism: str) -> None:
    """Refuse the peer's greeting as early as its bytes allow; ``data`` are those that are here.

    Raises `ZmtpError`: greeting.
    """
    # The eight bytes between are a length to ZMTP 1, which libzmq fills in; ZMTP 3 says nothing of them.
    if data[:1] not in {b"", b"\xff"} or data[9:10] not in {b"", b"\x7f"}:
        raise ZmtpError("greeting", f"the peer does not speak ZMTP 3: its first bytes are {data[:10]!r}")
    if len(data) > 10 and data[10] < 3:
        raise ZmtpError("greeting", f"the peer speaks version {data[10]} of ZMTP, this side 3.1")
    if len(data) >= BYTES and (theirs := data[_MECHANISM].rstrip(b"\0")) != mechanism.encode():
        raise ZmtpError("greeting", f"the peer's security mechanism is {theirs!r}, this side's {mechanism}")
