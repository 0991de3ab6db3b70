"""Binds the daemon's sockets: files for this host, an address for other kvds."""

from __future__ import annotations

import socket
from pathlib import Path

from kvd.addresses import join_address
from kvd.service.errors import StartError
from kvd.service.sockets.limits import BACKLOG


def bind_unix(path: Path, mode: int = 0o660) -> socket.socket:
    """A listening socket at a path, for kvd's user and group; nobody connects before it has its mode.

    Raises `StartError`.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.unlink(missing_ok=True)  # of a kvd that was killed: ours is the lock
        listening.bind(str(path))
        path.chmod(mode)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise _cannot(f"ipc://{path}", error) from None
    return listening


def bind_tcp(host: str, port: int) -> tuple[socket.socket, tuple[str, int]]:
    """A listening socket at an address, and the host and port that it has. Raises `StartError`."""
    address = f"tcp://{join_address(host, port)}"
    listening: socket.socket | None = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise _cannot(address, error) from None
    return listening, (host, listening.getsockname()[1])


def _cannot(address: str, error: OSError) -> StartError:
    hint = "see who has it: `ss -xlp`, `ss -tlp`"
    return StartError(f"cannot listen on {address}: {error.strerror}", hint=hint)
