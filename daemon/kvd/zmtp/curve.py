"""The mechanism CURVE (ZeroMQ's RFCs 25 and 26): both sides prove their keys, and everything is sealed.

C and S are the long-term keys of client and server, c and s pairs that live as long as the connection.

    client  HELLO      c's public key, a box of zeros (c -> S): the client knows S
    server  WELCOME    a box (S -> c): s's public key and a cookie
    client  INITIATE   the cookie, a box (c -> s): C's public key, a voucher (C -> s) of c and S, metadata
    server  READY      a box (s -> c): metadata
    both    MESSAGE    boxes between c and s
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from nacl.bindings import (
    crypto_box_beforenm,
    crypto_box_easy_afternm,
    crypto_box_keypair,
    crypto_box_open_easy_afternm,
    crypto_scalarmult_base,
)
from nacl.exceptions import CryptoError

from kvd.zmtp import z85
from kvd.zmtp.errors import ZmtpError, ZmtpErrorKind
from kvd.zmtp.frames import SHOWN, named, refusal, taken_apart
from kvd.zmtp.mechanism import SEALED_BYTES

NAME = "CURVE"
KEY = 32
MAC = 16
COOKIE = 96
HELLO = 2 + 72 + KEY + 8 + 64 + MAC
WELCOME = 16 + KEY + COOKIE + MAC
VOUCHER = 2 * KEY + MAC
MESSAGE = b"\7MESSAGE"


def generate() -> tuple[bytes, bytes]:
    """A new pair, public and secret, in Z85."""
    public, secret = crypto_box_keypair()
    return z85.encode(public), z85.encode(secret)


def public_of(secret: bytes) -> bytes:
    """The public key that belongs to a secret one, both in Z85. Raises `ValueError`."""
    return z85.encode(crypto_scalarmult_base(_raw(secret)))


def _raw(key: bytes) -> bytes:
    """The 32 bytes of a key in Z85. Raises `ValueError`."""
    raw = z85.decode(key)
    if len(raw) != KEY:
        raise ValueError(f"a CURVE key has 40 characters of Z85, this one {len(key)}")
    return raw


@dataclass(frozen=True, slots=True)
class CurveServer:
    """The side that is dialled. ``secret`` is in Z85; one that is no key raises `ValueError`.

    ``authorised`` is asked with the client's public key, in Z85, after the client has proved that it has the secret
    one. It must not wait.
    """

    secret: bytes = field(repr=False)
    authorised: Callable[[bytes], bool]
    name: str = NAME
    as_server: bool = True
    _pair: tuple[bytes, bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        secret = _raw(self.secret)
        object.__setattr__(self, "_pair", (crypto_scalarmult_base(secret), secret))

    def handshake(self, metadata: bytes) -> CurveServerHandshake:
        """A new connection's."""
        return CurveServerHandshake(self._pair, self.authorised, metadata)


@dataclass(frozen=True, slots=True)
class CurveClient:
    """The side that dials. ``secret`` is its own, ``server`` the public key of who is dialled, both in Z85."""

    secret: bytes = field(repr=False)
    server: bytes
    name: str = NAME
    as_server: bool = False

    def handshake(self, metadata: bytes) -> CurveClientHandshake:
        """A new connection's."""
        return CurveClientHandshake(_raw(self.secret), self.server, metadata)


class _Boxes:
    """What both sides share once c and s are known: boxes with strictly increasing nonces."""

    def __init__(self, ours: bytes, theirs: bytes) -> None:
        self.key = b""
        self._shared = b""
        self._ours, self._theirs = ours, theirs
        self._sent = 0
        self._taken = 0

    @property
    def boxes(self) -> Self:
        """Itself: the numbers of the handshake's boxes go on."""
        return self

    def seal(self, flags: int, body: bytes) -> tuple[bytes, bytes]:
        """The body of a MESSAGE: what stands before its box, and the box."""
        nonce = self._next()
        return MESSAGE + nonce, _box(bytes((flags,)) + body, self._ours + nonce, self._shared)

    def unseal(self, body: bytes) -> tuple[int, bytes]:
        """Flags and body of the frame in a MESSAGE. Raises `ZmtpError`: protocol."""
        if len(body) < SEALED_BYTES or not body.startswith(MESSAGE):
            raise ZmtpError("protocol", f"expected MESSAGE, the peer sends {len(body)} bytes: {body[:9]!r}")
        plain = _opened(body[16:], self._theirs + self._newer(body[8:16]), self._shared, "MESSAGE")
        return plain[0], plain[1:]

    def _next(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(8, "big")

    def _newer(self, nonce: bytes) -> bytes:
        # Only within a TCP connection that a box was opened on: who changes the number spoils the box.
        number = int.from_bytes(nonce, "big")
        if number <= self._taken:
            raise ZmtpError(
                "protocol", f"nonce {number} follows {self._taken}: a command came twice or out of order"
            )
        self._taken = number
        return nonce


class CurveServerHandshake(_Boxes):
    """Expects HELLO, then INITIATE."""

    def __init__(
        self, pair: tuple[bytes, bytes], authorised: Callable[[bytes], bool], metadata: bytes
    ) -> None:
        super().__init__(b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC")
        self._pair, self._authorised, self._metadata = pair, authorised, metadata
        self._take: Callable[[bytes, bytes], tuple[bytes, bytes | None]] = self._hello
        self._client = self._cookie = b""
        self._ephemeral = (b"", b"")

    def first(self) -> bytes:
        """Nothing: the client begins."""
        return b""

    def take(self, body: bytes) -> tuple[bytes, bytes | None]:
        """HELLO or INITIATE. Raises `ZmtpError`."""
        return self._take(*taken_apart(body))

    def _hello(self, name: bytes, data: bytes) -> tuple[bytes, None]:
        _expect(b"HELLO", name, data, HELLO)
        if data[:2] != b"\1\0":
            raise ZmtpError(
                "protocol", f"HELLO is of version {data[0]}.{data[1]} of CURVE, this side speaks 1.0"
            )
        self._client = data[74:106]
        shared = _shared(self._client, self._pair[1])
        signed = _opened(
            data[114:], b"CurveZMQHELLO---" + self._newer(data[106:114]), shared, "HELLO", "other_key"
        )
        if signed != bytes(64):
            raise ZmtpError("protocol", "HELLO is not signed by zeros")
        # Elsewhere the cookie carries c and s, so that a server need not remember them. This one has the connection
        # to remember them by, so the cookie only shows that who answers has read WELCOME.
        self._ephemeral = public, _ = crypto_box_keypair()
        self._cookie = os.urandom(COOKIE)
        nonce = os.urandom(16)
        self._take = self._initiate
        return named(b"WELCOME", nonce + _box(public + self._cookie, b"WELCOME-" + nonce, shared)), None

    def _initiate(self, name: bytes, data: bytes) -> tuple[bytes, bytes]:
        least = COOKIE + 8 + KEY + 16 + VOUCHER + MAC
        _expect(b"INITIATE", name, data, least, longer=True)
        if not hmac.compare_digest(data[:COOKIE], self._cookie):
            raise ZmtpError("protocol", "INITIATE brings another cookie than WELCOME gave")
        _, secret = self._ephemeral
        self._ephemeral = b"", b""
        self._shared = _shared(self._client, secret)
        nonce = b"CurveZMQINITIATE" + self._newer(data[COOKIE : COOKIE + 8])
        plain = _opened(data[COOKIE + 8 :], nonce, self._shared, "INITIATE")
        theirs, nonce, voucher = plain[:KEY], plain[KEY : KEY + 16], plain[KEY + 16 : KEY + 16 + VOUCHER]
        vouched = _opened(voucher, b"VOUCH---" + nonce, _shared(theirs, secret), "the voucher in INITIATE")
        if vouched != self._client + self._pair[0]:
            raise ZmtpError("protocol", "the voucher in INITIATE is for another connection or server")
        self.key = z85.encode(theirs)
        if not self._authorised(self.key):
            message = f"the peer's key {self.key.decode()} is not one that is let in"
            raise ZmtpError("not_authorised", message, named(b"ERROR", b"\x03400"), self.key)
        self._take = _nothing_more
        nonce = self._next()
        box = _box(self._metadata, b"CurveZMQREADY---" + nonce, self._shared)
        return named(b"READY", nonce + box), plain[KEY + 16 + VOUCHER :]


class CurveClientHandshake(_Boxes):
    """Sends HELLO, expects WELCOME and READY."""

    def __init__(self, secret: bytes, server: bytes, metadata: bytes) -> None:
        super().__init__(b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES")
        self.key = server
        self._secret, self._server, self._metadata = secret, _raw(server), metadata
        self._take: Callable[[bytes, bytes], tuple[bytes, bytes | None]] = self._welcome
        self._ephemeral = crypto_box_keypair()
        self._with_server = b""

    def first(self) -> bytes:
        """HELLO."""
        public, secret = self._ephemeral
        self._with_server = _shared(self._server, secret)
        nonce = self._next()
        box = _box(bytes(64), b"CurveZMQHELLO---" + nonce, self._with_server)
        return named(b"HELLO", b"\1\0" + bytes(72) + public + nonce + box)

    def take(self, body: bytes) -> tuple[bytes, bytes | None]:
        """WELCOME, READY or ERROR. Raises `ZmtpError`."""
        name, data = taken_apart(body)
        if name == b"ERROR":
            raise refusal(data)
        return self._take(name, data)

    def _welcome(self, name: bytes, data: bytes) -> tuple[bytes, None]:
        _expect(b"WELCOME", name, data, WELCOME)
        plain = _opened(data[16:], b"WELCOME-" + data[:16], self._with_server, "WELCOME")
        server, cookie = plain[:KEY], plain[KEY:]
        public, secret = self._ephemeral
        self._shared = _shared(server, secret)
        vouching = os.urandom(16)
        vouched = _box(public + self._server, b"VOUCH---" + vouching, _shared(server, self._secret))
        plain = crypto_scalarmult_base(self._secret) + vouching + vouched + self._metadata
        nonce = self._next()
        self._ephemeral, self._with_server = (b"", b""), b""
        self._take = self._ready
        return named(
            b"INITIATE", cookie + nonce + _box(plain, b"CurveZMQINITIATE" + nonce, self._shared)
        ), None

    def _ready(self, name: bytes, data: bytes) -> tuple[bytes, bytes]:
        _expect(b"READY", name, data, 8 + MAC, longer=True)
        nonce = self._newer(data[:8])
        self._take = _nothing_more
        return b"", _opened(data[8:], b"CurveZMQREADY---" + nonce, self._shared, "READY")


def _nothing_more(name: bytes, data: bytes) -> tuple[bytes, bytes | None]:
    raise ZmtpError(
        "protocol", f"the handshake is over, the peer sends {name[:SHOWN]!r} of {len(data)} bytes"
    )


def _expect(wanted: bytes, name: bytes, data: bytes, size: int, *, longer: bool = False) -> None:
    if name != wanted:
        raise ZmtpError(
            "protocol", f"expected {wanted.decode()}, the peer sends the command {name[:SHOWN]!r}"
        )
    if len(data) < size or (len(data) > size and not longer):
        least = "at least " if longer else ""
        raise ZmtpError("protocol", f"{wanted.decode()} has {len(data)} bytes, {least}{size} are expected")


def _shared(public: bytes, secret: bytes) -> bytes:
    try:
        return crypto_box_beforenm(public, secret)
    except CryptoError:
        raise ZmtpError("protocol", "the peer's key is one of the few that keep nothing secret") from None


def _box(plain: bytes, nonce: bytes, shared: bytes) -> bytes:
    return crypto_box_easy_afternm(plain, nonce, shared)


def _opened(
    box: bytes, nonce: bytes, shared: bytes, what: str, otherwise: ZmtpErrorKind = "protocol"
) -> bytes:
    try:
        return crypto_box_open_easy_afternm(box, nonce, shared)
    except CryptoError:
        raise ZmtpError(otherwise, f"{what} cannot be opened: another key, or changed on the way") from None
