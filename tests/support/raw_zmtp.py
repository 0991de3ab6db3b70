"""A client of kvd's sockets without libzmq: it sends what libzmq never would, and reads only when it is told to."""

from __future__ import annotations

import socket
from pathlib import Path

from kvd.zmtp import greeting
from kvd.zmtp.frames import command, metadata, named

SECONDS = 10.0


def connected(where: Path | int) -> socket.socket:
    """A connection to a socket's path, or to a port of this host, on which nothing has been said."""
    if isinstance(where, int):
        return socket.create_connection(("127.0.0.1", where), SECONDS)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(SECONDS)
    made.connect(str(where))
    return made


def spoken(where: Path | int, socket_type: str = "DEALER", identity: bytes = b"") -> socket.socket:
    """One after the handshake, as NULL has it."""
    made = connected(where)
    ready = metadata(Socket_Type=socket_type.encode(), Identity=identity)
    try:
        made.sendall(greeting.greeting("NULL", as_server=False) + command(named(b"READY", ready)))
        read(made, greeting.BYTES)
        frame(made)
    except BaseException:
        made.close()
        raise
    return made


def accepted(listening: socket.socket) -> socket.socket:
    """The next connection to a peer that is a ROUTER, after the handshake."""
    made, _ = listening.accept()
    made.settimeout(SECONDS)
    ready = metadata(Socket_Type=b"ROUTER", Identity=b"")
    made.sendall(greeting.greeting("NULL", as_server=False) + command(named(b"READY", ready)))
    read(made, greeting.BYTES)
    frame(made)
    return made


def frame(from_where: socket.socket) -> bytes:
    """The body of the next frame."""
    flags, size = read(from_where, 2)
    if flags & 2:
        size = int.from_bytes(bytes((size,)) + read(from_where, 7), "big")
    return read(from_where, size)


def read(from_where: socket.socket, size: int) -> bytes:
    """So many bytes. Raises `ConnectionError` where fewer come before the end."""
    got = bytearray()
    while len(got) < size:
        more = from_where.recv(size - len(got))
        if not more:
            raise ConnectionError(f"{len(got)} of {size} bytes came")
        got += more
    return bytes(got)
