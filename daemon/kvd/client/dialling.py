"""A TCP connection to another host by a deadline, which also holds for the look-up of its name."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any, TypeAlias

MOST_ADDRESSES = 8
"""Of one name that are tried."""
_Addresses: TypeAlias = list[tuple[Any, ...]]


class NotResolved(Exception):
    """No address is known for a name; the text says why."""


def dialled(host: str, port: int, until: float) -> socket.socket:
    """A connection to the first address of ``host`` that takes one, by ``until`` in monotonic seconds.

    Raises `NotResolved`, `TimeoutError`, or the `OSError` of the address that was tried last.
    """
    failed: OSError = TimeoutError()
    for family, kind, protocol, _, where in _resolved(host, port, until)[:MOST_ADDRESSES]:
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(_left(until))
            made.connect(where)
        except OSError as error:
            made.close()
            failed = error
        else:
            return made
    raise failed


def _resolved(host: str, port: int, until: float) -> _Addresses:
    """The addresses of a name. The resolver knows no deadline: where it is late, its thread is left behind."""
    came: queue.Queue[_Addresses | Exception] = queue.Queue()

    def look_up() -> None:
        try:
            came.put(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except (OSError, ValueError) as error:  # ValueError: such a name there cannot be
            came.put(error)

    threading.Thread(target=look_up, name="kvctl-resolver", daemon=True).start()
    try:
        found = came.get(timeout=_left(until))
    except queue.Empty:
        raise NotResolved(f"its name was not looked up in time: {host}") from None
    if isinstance(found, OSError):
        raise NotResolved(f"its name has no address: {found.strerror or found}")
    if isinstance(found, Exception):
        raise NotResolved("that is no name of a host")
    return found


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
