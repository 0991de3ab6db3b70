"""The connection of a session: ZMTP over kvd's Unix socket, read by the session's own thread.

libzmq has a thread of its own for this, so each message would wake two threads on its way out and two on its way in.
Some of libzmq's errors end the process, which here is vLLM's.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvd.shown import logger
from kvd.wire.limits import LARGEST
from kvd.zmtp.connection import Connection, ConnectionLimits
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, Received, ZmtpEvent
from kvd.zmtp.null import Null

log = logger(__name__)

SCHEME = "ipc://"
AGAIN_SECONDS = 0.05
"""Least pause before the next connection; it may be twice as long, so that the workers of a host spread."""
HANDSHAKE_SECONDS = 30.0
"""How long kvd may take to answer a connection. One that starts up accepts it later; one that is stopped does not."""
READ_BYTES = 64 << 10
LONG_READ_BYTES = 1 << 20
"""Bytes read at a time of a message that has begun and is larger."""
MOST_UNSENT = 4096
"""Buffers that wait for kvd to read them; more messages are not taken."""


class LocalLine:
    """One connection to kvd after another, for one thread at a time. Nothing waits but `wait`.

    While one thread is in `wait` another may `send`, if the line is ``ready``. What the kernel does not take of that is
    sent once the first waits anew. Nothing is kept for a kvd that is away. ``changed`` is called with True when
    messages may be sent, and with False when the connection that was so is lost.
    """

    def __init__(self, address: str, wakes: Sequence[int], changed: Callable[[bool], None]) -> None:
        """``wakes`` are descriptors that end a wait as well."""
        self.ready = False
        """Messages may be sent."""
        self._path = address.removeprefix(SCHEME)
        self._wakes = frozenset(wakes)
        self._changed = changed
        self._poll = select.poll()
        for wake in wakes:
            self._poll.register(wake, select.POLLIN)
        self._socket: socket.socket | None = None
        self._zmtp = _connection()
        self._events: Iterator[ZmtpEvent] | None = None  # of bytes that are here and not taken apart yet
        self._readable = self._writable = False
        self._outbox: deque[bytes | memoryview] = deque()
        self._due = 0.0  # the next connection, or the end of this one's handshake

    def wait(self, milliseconds: int) -> bool:
        """Until kvd has sent something, one of ``wakes`` can be read, or that time is over. Whether one can be read."""
        if not self.ready:
            milliseconds = min(milliseconds, self._keep_trying())
        woken = False
        for fd, mask in self._poll.poll(milliseconds if self._events is None else 0):
            if fd in self._wakes:
                woken = True
                continue
            self._readable = self._readable or bool(mask & ~select.POLLOUT)
            self._writable = self._writable or bool(mask & select.POLLOUT)
        return woken

    def is_free(self) -> bool:
        """Whether a message that is sent now goes to the kernel at once."""
        return self.ready and not self._outbox

    def received(self) -> Iterator[bytes]:
        """The messages that are here. Who stops taking them is given the rest the next time.

        A message of several frames, which kvd never sends, is an empty one.
        """
        while True:
            while self._events is not None:
                try:
                    event = next(self._events, None)
                except ZmtpError as error:
                    log.warning("kvd at %s sent what cannot be read: %s", self._path, error.message)
                    self._lose()
                    return
                if event is None:
                    self._events = None
                    self._put(self._zmtp.outgoing())
                elif isinstance(event, Received):
                    yield event.body
                elif isinstance(event, Handshaken):
                    self.ready = True
                    self._changed(True)
            if not self._read():
                return

    def send(self, message: bytes) -> bool:
        """Send without waiting; False where there is no connection, or kvd has left too much unread."""
        if not self.ready or len(self._outbox) >= MOST_UNSENT:
            return False
        for buffer in self._zmtp.message(message):
            self._put(buffer)
        return True

    def flush(self) -> None:
        """Send what kvd had no room for, if `wait` saw that there is room."""
        if self._socket is None or not self._writable:
            return
        self._writable = False
        while self._outbox:
            first = self._outbox[0]
            sent = _write(self._socket, first)
            if sent < len(first):
                self._outbox[0] = memoryview(first)[sent:]
                return
            self._outbox.popleft()
        self._poll.modify(self._socket, select.POLLIN)

    def close(self) -> None:
        """Close the connection. What kvd has not been sent yet is dropped."""
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket, self._events, self._readable, self.ready = None, None, False, False
        self._writable = False
        self._outbox.clear()

    def _keep_trying(self) -> int:
        """Connect where that is due; in how many milliseconds the next thing is."""
        now = time.monotonic()
        if now >= self._due:
            if self._socket is not None:
                self._lose()
            else:
                self._connect(now)
        return max(0, int((self._due - now) * 1000) + 1)

    def _connect(self, now: float) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            made.connect(self._path)
        except OSError:  # there is no kvd, or too many connect to it just now
            made.close()
            self._due = now + AGAIN_SECONDS * (1 + random.random())  # noqa: S311 (nobody has to guess it)
            return
        self._socket, self._zmtp, self._due = made, _connection(), now + HANDSHAKE_SECONDS
        self._poll.register(made, select.POLLIN)
        self._put(self._zmtp.start())

    def _lose(self) -> None:
        """The connection is over; the next one is made after a pause."""
        was_ready = self.ready
        self.close()
        self._due = time.monotonic() + AGAIN_SECONDS * (1 + random.random())  # noqa: S311 (as above)
        if was_ready:
            self._changed(False)

    def _read(self) -> bool:
        """Whether more is here; False also where the connection ends."""
        if self._socket is None or not (self._readable or self._zmtp.wanted):
            return False
        size = min(max(READ_BYTES, self._zmtp.wanted), LONG_READ_BYTES)
        self._readable = False
        try:
            data = self._socket.recv(size)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._lose()
            return False
        self._readable = len(data) == size
        self._events = self._zmtp.receive(data)
        return True

    def _put(self, buffer: bytes) -> None:
        """Send now what the kernel takes, and the rest later."""
        if self._socket is None or not buffer:
            return
        if self._outbox:
            self._outbox.append(buffer)
            return
        sent = _write(self._socket, buffer)
        if sent < len(buffer):
            self._outbox.append(memoryview(buffer)[sent:])
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)


def _write(connected: socket.socket, buffer: bytes | memoryview) -> int:
    """How many bytes the kernel took. Of a connection that has ended it takes all: reading will show the end."""
    try:
        return connected.send(buffer, socket.MSG_NOSIGNAL)
    except (BlockingIOError, InterruptedError):
        return 0
    except OSError:
        return len(buffer)


def _connection() -> Connection:
    return Connection("DEALER", Null(), ConnectionLimits(message=LARGEST))
