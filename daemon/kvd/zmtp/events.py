"""What a connection tells of its peer."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Handshaken(msgspec.Struct, frozen=True, gc=False):
    """The peer may send messages and be sent some. ``identity`` is what it calls itself; nothing proves it.

    ``key`` is the peer's public CURVE key, 40 bytes of Z85, which it has proved to have; empty under NULL.
    """

    socket_type: str
    identity: bytes
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


ZmtpEvent: TypeAlias = Handshaken | Received | Subscribed | Unsubscribed
