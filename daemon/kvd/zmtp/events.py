"""What a connection tells of its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvd.zmtp.errors import ZmtpError


class Handshaken(msgspec.Struct, frozen=True, gc=False):
    """The peer may send messages and be sent some. What it calls itself means nothing, and is not kept.

    ``key`` is the peer's public CURVE key, 40 bytes of Z85, which it has proved to have; empty under NULL.
    """

    socket_type: str
    key: bytes


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message. Of one with several ``frames`` only their number and ``size``, their bytes together, are kept."""

    body: bytes
    frames: int
    size: int


class Subscribed(msgspec.Struct, frozen=True, gc=False):
    """The peer wants what begins with ``topic``."""

    topic: bytes


class Unsubscribed(msgspec.Struct, frozen=True, gc=False):
    """The peer no longer wants what begins with ``topic``."""

    topic: bytes


class LargeBox:
    """A large sealed frame is here, and what it means is the next event. Opening it takes up to 85 ms for 16 MiB.

    Who cannot wait so long has `open` called on another thread, and goes on with the connection's events when it has
    returned. Else they go on with opening it. The connection may be written to meanwhile.
    """

    __slots__ = ("_box", "_error", "_opened", "_unseal")

    def __init__(self, unseal: Callable[[bytes], tuple[int, bytes]], box: bytes) -> None:
        self._unseal, self._box = unseal, box
        self._opened: tuple[int, bytes] | None = None
        self._error: ZmtpError | None = None

    def open(self) -> None:
        """Open it; what is wrong with it is raised by the connection's events. Idempotent."""
        box, self._box = self._box, b""
        try:
            if box:
                self._opened = self._unseal(box)
        except ZmtpError as error:
            self._error = error

    def opened(self) -> tuple[int, bytes]:
        """Flags and body of the frame in it. Raises `ZmtpError`."""
        self.open()
        if self._opened is None:
            raise self._error or ZmtpError("protocol", "an empty box")
        return self._opened


ZmtpEvent: TypeAlias = Handshaken | Received | Subscribed | Unsubscribed | LargeBox
