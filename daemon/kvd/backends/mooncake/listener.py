"""Ending the wait of a Mooncake engine's listener, which its destruction would wait for while holding the GIL.

The engine's destructor joins a thread that waits in ``accept`` for up to a second, and for up to a minute in ``recv``
where somebody connected and says nothing. All threads of this process stand still for that long. So before an engine is
destroyed its listening socket is made not to wait and its half-open conversations are hung up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def end_wait(port: int) -> None:
    """Make whatever listens on ``port`` in this process return at once, now and from now on.

    Does nothing where there is no such socket or no /proc: destruction then only takes longer.
    """
    for own in _sockets_on(port):
        with own, suppress(OSError):
            if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own.shutdown(socket.SHUT_RDWR)
                continue
            own.setblocking(False)  # of the engine's descriptor too: they share it
            _hang_up(own)
            _wake(own.family, port)
    for own in _sockets_on(port):  # what was accepted meanwhile
        with own, suppress(OSError):
            if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own.shutdown(socket.SHUT_RDWR)


def _hang_up(listening: socket.socket) -> None:
    """Close the connections that wait to be accepted."""
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return


def _wake(family: int, port: int) -> None:
    """End an ``accept`` that began before its socket was told not to wait."""
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    socket.create_connection((host, port), 0.2).close()


def _sockets_on(port: int) -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets whose own port is ``port``."""
    try:
        entries = list(Path("/proc/self/fd").iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            own = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # closed meanwhile
        with suppress(OSError):
            if (
                own.family in {socket.AF_INET, socket.AF_INET6}
                and own.type == socket.SOCK_STREAM
                and own.getsockname()[1] == port
            ):
                yield own
                continue
        own.close()
