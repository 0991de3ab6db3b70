"""Frames, commands and metadata as bytes."""

from __future__ import annotations

from kvd.zmtp.errors import ZmtpError

MORE, LONG, COMMAND = 1, 2, 4
LONGEST_SHORT = 255
"""Bytes of a frame whose size is written as one byte."""
COPIED = 4096
"""A body of up to so many bytes is copied behind its header: one buffer is cheaper to write than two."""
MOST_ITEMS = 16
"""Entries of metadata that are read. libzmq sends two, and what an application adds (Resource, X-...)."""

SHOWN = 40
"""Most bytes of a peer's that an error shows, as Python writes them: an error may be logged, and must be short."""


def header(flags: int, size: int) -> bytes:
    """What stands before a frame's body."""
    if size <= LONGEST_SHORT:
        return bytes((flags, size))
    return bytes((flags | LONG,)) + size.to_bytes(8, "big")


def frame(flags: int, body: bytes, before: bytes = b"") -> list[bytes]:
    """What is written for one frame of ``before`` and ``body``; a large body is not copied."""
    first = header(flags, len(before) + len(body)) + before
    return [first + body] if len(body) <= COPIED else [first, body]


def buffers(*bodies: bytes) -> list[bytes]:
    """What is written for one message of these frames where nothing is sealed."""
    if len(bodies) == 1:
        return frame(0, bodies[0])
    written = []
    last = len(bodies) - 1
    for number, body in enumerate(bodies):
        written += frame(MORE if number < last else 0, body)
    return written


def named(name: bytes, data: bytes = b"") -> bytes:
    """The body of a command."""
    return bytes((len(name),)) + name + data


def command(body: bytes) -> bytes:
    """The frame of a command."""
    return header(COMMAND, len(body)) + body


def taken_apart(body: bytes) -> tuple[bytes, bytes]:
    """Name and data of a command's body. Raises `ZmtpError`: protocol."""
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise ZmtpError("protocol", f"a command of {len(body)} bytes has no name")
    return body[1:end], body[end:]


def metadata(**properties: bytes) -> bytes:
    """The metadata of a handshake; an underscore in a name stands for its dash."""
    packed = b""
    for name, value in properties.items():
        packed += named(name.replace("_", "-").encode(), len(value).to_bytes(4, "big") + value)
    return packed


def properties(packed: bytes) -> dict[str, bytes]:
    """A handshake's metadata; names are in lower case. Raises `ZmtpError`: protocol, too_large."""
    found: dict[str, bytes] = {}
    at, end = 0, len(packed)
    while at < end:
        if len(found) == MOST_ITEMS:
            raise ZmtpError("too_large", f"metadata has more than {MOST_ITEMS} entries")
        value_at = at + 1 + packed[at] + 4
        value_end = value_at + int.from_bytes(packed[value_at - 4 : value_at], "big")
        if value_at > end or value_end > end:
            raise ZmtpError("protocol", f"metadata ends within an entry, {end - at} bytes before its end")
        name = packed[at + 1 : value_at - 4].decode("latin-1").lower()
        if not name:
            raise ZmtpError("protocol", "metadata has an empty name")
        if name in found:
            raise ZmtpError("protocol", f"metadata names {name[:SHOWN]!r} twice")
        found[name] = packed[value_at:value_end]
        at = value_end
    return found


def refusal(data: bytes) -> ZmtpError:
    """The peer's ERROR as ours; ``data`` is the command's."""
    # libzmq's reasons are three digits, which its authentication (ZAP) gives: 400 is a key that is not let in.
    reason = data[1 : 1 + data[0]] if data else b""
    text = reason.decode("ascii", "backslashreplace")
    return ZmtpError(
        "not_authorised" if reason == b"400" else "protocol", f"the peer refuses: {text[:SHOWN]!r}"
    )
