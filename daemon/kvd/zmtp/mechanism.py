"""What a connection asks of a security mechanism. A mechanism is shared; a `Handshake` is one connection's."""

from __future__ import annotations

from typing import Protocol

SEALED_BYTES = len(b"\7MESSAGE") + 8 + 16 + 1
"""What sealing adds to the body of a frame: the command's name, a nonce, a checksum, flags."""


class Boxes(Protocol):
    """How messages of one connection travel sealed."""

    def seal(self, flags: int, body: bytes) -> tuple[bytes, bytes]:
        """The body of the frame that carries ``body``, in two parts."""

    def unseal(self, body: bytes) -> tuple[int, bytes]:
        """Flags and body of the frame that was sealed. Raises `ZmtpError`: protocol."""


class Handshake(Protocol):
    """One connection's side of a mechanism, until the peer is known."""

    key: bytes
    """The peer's public key, 40 bytes of Z85; empty where the mechanism has none."""

    @property
    def boxes(self) -> Boxes | None:
        """What seals messages once the handshake is over; None where they travel open."""

    def first(self) -> bytes:
        """The command (its body) that follows our greeting at once, or nothing."""

    def take(self, body: bytes) -> tuple[bytes, bytes | None]:
        """Take the peer's command. The command that answers it, or nothing; and its metadata once it is ready.

        Raises `ZmtpError`. Its ``farewell`` is a command that tells the peer why.
        """


class Mechanism(Protocol):
    """NULL, CURVE's server or CURVE's client."""

    @property
    def name(self) -> str:
        """As it stands in the greeting."""

    @property
    def as_server(self) -> bool:
        """Whether this side is the one that lets in."""

    def handshake(self, metadata: bytes) -> Handshake:
        """A new connection's; ``metadata`` is ours."""
