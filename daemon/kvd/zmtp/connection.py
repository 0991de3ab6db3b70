"""One connection: bytes of the peer become events, messages become bytes. No I/O, no clock."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvd.zmtp import greeting
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, LargeBox, Received, Subscribed, Unsubscribed, ZmtpEvent
from kvd.zmtp.frames import (
    COMMAND,
    LONG,
    MORE,
    SHOWN,
    buffers,
    command,
    frame,
    metadata,
    named,
    properties,
    refusal,
    taken_apart,
)
from kvd.zmtp.mechanism import SEALED_BYTES, Mechanism

SocketType = Literal["ROUTER", "DEALER", "PUB"]

MOST_FRAMES = 64
"""Frames of one message. kvd's have one, REQ's two; nothing of more than one is kept."""
LONGEST_PING = 16
"""Bytes that a PING may want back (RFC 37)."""
LONGEST_IDENTITY = 255
LARGE_BOX = 256 << 10
"""A sealed frame of more bytes is an event of its own: opening so many takes about a millisecond."""
_RESERVED = 0xF8
_SEALED_COMMAND = 2
"""In a box it is the second bit that says so, since a box needs no size."""
_COMMAND_NAME = len(b"\x09SUBSCRIBE")
_FITS = {
    "ROUTER": ("DEALER", "REQ", "ROUTER"),
    "DEALER": ("DEALER", "REP", "ROUTER"),
    "PUB": ("SUB", "XSUB"),
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one peer may send, in bytes: a message with all its frames, a handshake's command, a subscription."""

    message: int
    handshake: int = 4096
    topic: int = 256


class Connection:
    """The state of one connection.

    What `message` and `outgoing` return is written in the order of the calls: under CURVE each has a number higher than
    the one before. What is never written leaves a gap, which does no harm. What ends a handshake belongs before all
    messages, so `message` returns it too where `outgoing` was not asked for it.
    """

    __slots__ = (
        "_at", "_body", "_boxes", "_chunk", "_failed", "_flags", "_frame", "_frames", "_greeted", "_handshake",
        "_limits", "_longest", "_mechanism", "_pong", "_security", "_size", "_skip", "_type", "ready", "wanted",
    )  # fmt: skip

    def __init__(self, socket_type: SocketType, mechanism: Mechanism, limits: ConnectionLimits) -> None:
        ours = {} if socket_type == "PUB" else {"Identity": b""}
        self.ready = False
        """Messages may be sent."""
        self.wanted = 0
        """Bytes of the frame that has begun which are not here yet and will be kept; known with its header."""
        self._type, self._mechanism, self._limits = socket_type, mechanism, limits
        self._security = mechanism.handshake(metadata(Socket_Type=socket_type.encode(), **ours))
        self._boxes = self._security.boxes
        self._longest = limits.topic + 1 if socket_type == "PUB" else limits.message
        self._greeted = False
        self._failed: ZmtpError | None = None
        self._chunk = b""  # what was received last; what stands before _at has been taken
        self._at = 0
        self._body: io.BytesIO | None = None  # of the frame that has begun
        self._skip = 0  # bytes of the frame that has begun which are not here yet and will not be kept
        self._flags = 0
        self._frame = 0  # bytes of the frame that has begun
        self._frames = self._size = 0  # of the message that has begun, without that frame
        self._handshake = b""  # to be sent
        self._pong: bytes | None = None  # to be sent

    @property
    def held(self) -> int:
        """Bytes of the peer's that are kept now."""
        return len(self._chunk) + (self._body.tell() if self._body is not None else 0)

    def start(self) -> bytes:
        """What is sent first, without waiting for the peer: under NULL all that this side has to say of itself."""
        first = self._security.first()
        greeted = greeting.greeting(self._mechanism.name, as_server=self._mechanism.as_server)
        return greeted + command(first) if first else greeted

    def receive(self, data: bytes | bytearray | memoryview) -> Iterator[ZmtpEvent]:
        """Keep ``data``; the iterator takes it apart, one event a step.

        Who stops stepping may go on later with ``receive(b"")``: what was not taken apart counts in `held`. Read no
        more until then, since new data is joined to the rest by copying. The iterator raises `ZmtpError`, and again
        whenever it is asked after that; write `outgoing` then, and close.
        """
        if self._failed is not None:
            return self._events()
        if self._at < len(self._chunk):
            self._chunk = self._chunk[self._at :] + data
        else:
            self._chunk = bytes(data)
        self._at = 0
        return self._events()

    def outgoing(self) -> bytes:
        """What receiving made necessary to send: the handshake, an answer to a PING. Mostly nothing."""
        written, self._handshake = self._handshake, b""
        if self._pong is not None:
            written += self._control(named(b"PONG", self._pong))
            self._pong = None
        return written

    def message(self, *frames: bytes) -> list[bytes]:
        """What is written for one message. Under NULL `kvd.zmtp.frames.buffers` gives the same for any connection."""
        if not self.ready:
            raise RuntimeError("the handshake is not over: wait for Handshaken")
        written = [self.outgoing()] if self._handshake else []
        if self._boxes is None:
            return written + buffers(*frames) if written else buffers(*frames)
        last = len(frames) - 1
        for number, body in enumerate(frames):
            before, box = self._boxes.seal(MORE if number < last else 0, body)
            written += frame(0, box, before)
        return written

    def _control(self, body: bytes) -> bytes:
        if self._boxes is None:
            return command(body)
        before, box = self._boxes.seal(_SEALED_COMMAND, body)
        return b"".join(frame(0, box, before))

    def _events(self) -> Iterator[ZmtpEvent]:
        if self._failed is not None:
            raise self._failed
        try:
            if not self._greeted and not self._greet():
                return
            while (taken := self._next_frame()) is not None:
                if self.ready and self._boxes is not None and len(taken[1]) > LARGE_BOX:
                    box = LargeBox(self._boxes.unseal, taken[1])
                    del taken  # the box lets go of it
                    yield box
                    event = self._open(*box.opened())
                else:
                    event = self._take(*taken)
                if event is not None:
                    yield event
        except ZmtpError as error:
            self._fail(error)
            raise

    def _fail(self, error: ZmtpError) -> None:
        self._failed, self.ready = error, False
        self._chunk, self._at, self._body, self._pong = b"", 0, None, None
        self.wanted = self._skip = 0
        if error.farewell:
            self._handshake += command(error.farewell)

    def _greet(self) -> bool:
        """Take the peer's greeting; False where some of it is not here yet."""
        greeting.check(self._chunk, self._mechanism.name)
        if len(self._chunk) < greeting.BYTES:
            return False
        self._greeted, self._at = True, greeting.BYTES
        return True

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Flags and body of the next frame that is here whole. A body that is not kept is empty."""
        if self.wanted or self._skip:
            return self._go_on()
        chunk, at = self._chunk, self._at
        left = len(chunk) - at
        if left < 2:
            self._keep_rest()
            return None
        flags = chunk[at]
        if flags & LONG:
            if left < 9:
                self._keep_rest()
                return None
            size = int.from_bytes(chunk[at + 1 : at + 9], "big")
            at += 9
        else:
            size = chunk[at + 1]
            at += 2
        kept = self._admit(flags, size)
        self._frame = size
        end = at + size
        if end <= len(chunk):
            self._at = end
            return flags, chunk[at:end] if kept else b""
        self._flags = flags
        if kept:
            self._body = io.BytesIO()
            self._body.write(memoryview(chunk)[at:])
            self.wanted = end - len(chunk)
        else:
            self._skip = end - len(chunk)
        self._chunk, self._at = b"", 0
        return None

    def _keep_rest(self) -> None:
        """Let go of a chunk but for the few bytes of a header that has begun."""
        self._chunk, self._at = self._chunk[self._at :], 0

    def _go_on(self) -> tuple[int, bytes] | None:
        """The frame that has begun, once it is here."""
        chunk, at = self._chunk, self._at
        taken = min(len(chunk) - at, self.wanted or self._skip)
        self._at = at + taken
        if self._body is None:
            self._skip -= taken
        else:
            self._body.write(memoryview(chunk)[at : at + taken])
            self.wanted -= taken
        if self._at == len(chunk):
            self._chunk, self._at = b"", 0
        if self.wanted or self._skip:
            return None
        body, self._body = self._body, None
        return self._flags, b"" if body is None else body.getvalue()

    def _admit(self, flags: int, size: int) -> bool:
        """Refuse a frame by its header; whether its body is to be kept. Raises `ZmtpError`."""
        if flags & _RESERVED or (flags & COMMAND and flags & MORE):
            raise ZmtpError("protocol", f"a frame begins with 0x{flags:02x}, which is no frame's first byte")
        limits = self._limits
        if not self.ready:
            if not flags & COMMAND:
                raise ZmtpError("protocol", f"a message of {size} bytes before the handshake is over")
            if size > limits.handshake:
                raise _too_large("a command of the handshake", size, limits.handshake)
            return True
        if self._boxes is not None:
            # What is in a box is known, and limited more narrowly, once it is open.
            if flags & MORE:
                raise ZmtpError(
                    "protocol", "a frame of a sealed message says that more follow; only the box may"
                )
            if size > self._longest_frame():
                raise _too_large("a sealed frame", size, self._longest_frame())
            return True
        self._admit_plain(flags, size)
        return bool(flags & COMMAND) or not (flags & MORE or self._frames)

    def _longest_frame(self) -> int:
        return max(self._longest - self._size, self._limits.handshake, self._limits.topic) + SEALED_BYTES

    def _admit_plain(self, flags: int, size: int) -> None:
        if flags & COMMAND:
            longest = max(self._limits.handshake, self._limits.topic + _COMMAND_NAME)
            if size > longest:
                raise _too_large("a command", size, longest)
            return
        if self._size + size > self._longest:
            raise _too_large("a message", self._size + size, self._longest)
        if self._frames == MOST_FRAMES:
            raise ZmtpError("too_large", f"a message has more than {MOST_FRAMES} frames")

    def _take(self, flags: int, body: bytes) -> ZmtpEvent | None:
        """What a whole frame means. Raises `ZmtpError`."""
        if not self.ready:
            return self._shake_hands(body)
        if self._boxes is not None:
            return self._open(*self._boxes.unseal(body))
        return self._understand(flags, body, self._frame)

    def _open(self, sealed: int, body: bytes) -> ZmtpEvent | None:
        """What was in a box means. Raises `ZmtpError`."""
        if sealed > _SEALED_COMMAND | MORE or sealed == _SEALED_COMMAND | MORE:
            raise ZmtpError("protocol", f"a box begins with 0x{sealed:02x}, which is no frame's flags")
        flags = sealed & MORE | (COMMAND if sealed & _SEALED_COMMAND else 0)
        self._admit_plain(flags, len(body))
        return self._understand(flags, body, len(body))

    def _understand(self, flags: int, body: bytes, size: int) -> ZmtpEvent | None:
        if flags & COMMAND:
            return self._obey(body)
        if flags & MORE:
            self._frames += 1
            self._size += size
            return None
        if self._frames:
            message = Received(b"", self._frames + 1, self._size + size)
            self._frames = self._size = 0
            return message if self._type != "PUB" else None
        return Received(body, 1, size) if self._type != "PUB" else _subscription(body)

    def _shake_hands(self, body: bytes) -> Handshaken | None:
        answer, packed = self._security.take(body)
        if packed is None:
            self._handshake += command(answer)
            return None
        theirs = properties(packed)
        kind = theirs.get("socket-type", b"").decode("latin-1")
        if kind not in _FITS[self._type]:
            wanted = " or ".join(_FITS[self._type])
            raise ZmtpError("protocol", f"the peer is a {kind[:SHOWN]!r}, a {self._type} talks to {wanted}")
        identity = theirs.get("identity", b"")
        if len(identity) > LONGEST_IDENTITY:
            raise _too_large("an identity", len(identity), LONGEST_IDENTITY)
        if answer:
            self._handshake += command(answer)
        self.ready = True
        return Handshaken(kind, self._security.key)

    def _obey(self, body: bytes) -> ZmtpEvent | None:
        """A command after the handshake. One that is not known means nothing to us, and is not kept."""
        name, data = taken_apart(body)
        if name == b"PING":
            if not 2 <= len(data) <= 2 + LONGEST_PING:
                raise ZmtpError(
                    "protocol", f"PING has {len(data)} bytes, 2 to {2 + LONGEST_PING} are allowed"
                )
            # Of many that came before one could be answered the last is: it shows as well that this side lives.
            self._pong = data[2:]
        elif self._type == "PUB" and name in {b"SUBSCRIBE", b"CANCEL"}:
            if len(data) > self._limits.topic:
                raise _too_large("a subscription", len(data), self._limits.topic)
            return Subscribed(data) if name == b"SUBSCRIBE" else Unsubscribed(data)
        elif name == b"ERROR":
            raise refusal(data)
        return None


def _subscription(body: bytes) -> Subscribed | Unsubscribed | None:
    """What a message to a PUB means: ZMTP 3.0 subscribes that way. Others mean nothing."""
    if body[:1] == b"\1":
        return Subscribed(body[1:])
    return Unsubscribed(body[1:]) if body[:1] == b"\0" else None


def _too_large(what: str, size: int, limit: int) -> ZmtpError:
    return ZmtpError("too_large", f"{what} has {size} bytes, the limit is {limit}")
