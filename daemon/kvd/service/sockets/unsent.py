"""What waits to be sent on all connections, in bytes."""

from __future__ import annotations

import time
from typing import Protocol

from kvd.service.sockets.limits import UNREAD_SECONDS, UNSENT_TOTAL_BYTES

LARGE = 64 << 10
"""A buffer of more bytes may wait for many readers (the card of a large engine), and counts once."""
OVERHEAD = 64
"""Bytes that a small buffer costs besides its own."""


class Unread(Protocol):
    """A connection on which something waits to be read. ``unread_since`` is time.monotonic()."""

    unread_since: float

    def flush(self) -> None:
        """Send what the kernel takes."""

    def give_up(self) -> None:
        """End it: its peer does not read."""


class Unsent:
    """Counts buffers that wait, and ends the connections of those that do not read."""

    def __init__(self) -> None:
        self.total = 0
        self.waiting: dict[Unread, None] = {}
        """Connections with something that waits."""
        self._large: dict[int, int] = {}

    def add(self, buffer: bytes) -> None:
        """A connection has to send it later."""
        if len(buffer) > LARGE:
            users = self._large.get(id(buffer), 0)
            self._large[id(buffer)] = users + 1
            if users:
                return
        self.total += len(buffer) + OVERHEAD

    def remove(self, buffer: bytes) -> None:
        """It was sent, or will never be; the caller still holds it."""
        if len(buffer) > LARGE:
            users = self._large.pop(id(buffer)) - 1
            if users:
                self._large[id(buffer)] = users
                return
        self.total -= len(buffer) + OVERHEAD

    def make_room(self) -> None:
        """End connections, the one that has read nothing for longest first, until the total is within its bound."""
        # One alone may exceed it: a single large message, which its reader takes soon, or else `sweep` ends it.
        while self.total > UNSENT_TOTAL_BYTES and len(self.waiting) > 1:
            min(self.waiting, key=lambda connection: connection.unread_since).give_up()

    def sweep(self) -> None:
        """End who has read nothing for too long."""
        before = time.monotonic() - UNREAD_SECONDS
        for connection in [one for one in self.waiting if one.unread_since < before]:
            connection.give_up()
