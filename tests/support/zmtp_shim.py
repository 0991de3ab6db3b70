"""A `kvd.zmtp` connection on a blocking socket, for tests that talk to real ZeroMQ sockets."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from kvd.zmtp.connection import Connection, ConnectionLimits, SocketType
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import LargeBox, ZmtpEvent
from kvd.zmtp.mechanism import Mechanism
from kvd.zmtp.null import Null

LIMITS = ConnectionLimits(message=1 << 20)
PIECE = 1 << 16


class Shim:
    """Both at once: a connection of ours and the socket under it."""

    def __init__(
        self,
        stream: socket.socket,
        kind: SocketType,
        mechanism: Mechanism | None = None,
        limits: ConnectionLimits = LIMITS,
    ) -> None:
        self.connection = Connection(kind, mechanism or Null(), limits)
        self.stream = stream
        self._events: deque[ZmtpEvent] = deque()
        stream.settimeout(10)
        stream.sendall(self.connection.start())

    def event(self) -> ZmtpEvent:
        """The next event; large boxes are opened here.

        Raises `ZmtpError`, `EOFError` where the peer has gone, `TimeoutError` after 10 s.
        """
        while not self._events:
            data = self.stream.recv(PIECE)
            if not data:
                raise EOFError
            try:
                events = self.connection.receive(data)
                self._events.extend(event for event in events if not isinstance(event, LargeBox))
            except ZmtpError:
                self.stream.sendall(self.connection.outgoing())
                raise
            self.stream.sendall(self.connection.outgoing())
        return self._events.popleft()

    def send(self, *frames: bytes) -> None:
        """One message."""
        self.stream.sendall(b"".join(self.connection.message(*frames)))


@contextmanager
def listening(path: Path | None = None) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket, of a file or on loopback, and its address as ZeroMQ's clients write it."""
    if path is not None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        address = f"ipc://{path}"
    else:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with listener:
        listener.settimeout(10)
        listener.listen()
        yield listener, address


def dial(address: str) -> socket.socket:
    """A connection to a listening socket of ZeroMQ's."""
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), 10)


@contextmanager
def sockets() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context for ZeroMQ's sockets that wait for at most 10 s."""
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)
        context.setsockopt(zmq.RCVTIMEO, 10_000)
        yield context
