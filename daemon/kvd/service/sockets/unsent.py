"""What waits to be sent on all connections, in bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from typing import Protocol

from kvd.service.fairness.queue import Path
from kvd.service.sockets.limits import UNREAD_SECONDS, UNSENT_PAUSE_BYTES, UNSENT_TOTAL_BYTES, share_of

LARGE = 64 << 10
"""A buffer of more bytes may wait for many readers (the card of a large engine), and counts once."""
OVERHEAD = 64
"""Bytes that a small buffer costs besides its own."""


class Unread(Protocol):
    """A connection on which something waits to be read; ``path`` says whose it is. Times are time.monotonic().

    Since ``unread_since`` its peer has read nothing, since ``first_since`` the same buffer is first in line.
    """

    path: Path
    unread_since: float
    first_since: float

    def flush(self) -> None:
        """Send what the kernel takes."""

    def give_up(self) -> None:
        """End it: its peer does not read."""


class Unsent:
    """Counts buffers that wait, in all and by user, and ends the connections of those that do not read.

    Over ``most`` bytes connections end.
    """

    def __init__(self, most: int = UNSENT_TOTAL_BYTES) -> None:
        self.total = 0
        self.waiting: dict[Unread, Hashable] = {}
        """Connections with something that waits, and the user (address, key) that each counted for when it began to."""
        self._most = most
        self._users: Counter[Hashable] = Counter()
        self._large: dict[int, Counter[Hashable]] = {}
        self._sizes: dict[int, int] = {}  # of the large ones

    def add(self, connection: Unread, buffer: bytes) -> None:
        """A connection has to send it later."""
        user = self.waiting.setdefault(connection, connection.path[0])
        first = True
        if len(buffer) > LARGE:
            readers = self._large.setdefault(id(buffer), Counter())
            readers[user] += 1
            if readers[user] > 1:
                return
            first = len(readers) == 1
            self._sizes[id(buffer)] = len(buffer)
        self._users[user] += len(buffer) + OVERHEAD
        if first:
            self.total += len(buffer) + OVERHEAD

    def remove(self, connection: Unread, buffer: bytes) -> None:
        """It was sent, or will never be; the caller still holds it."""
        user = self.waiting[connection]
        last = True
        if len(buffer) > LARGE:
            readers = self._large[id(buffer)]
            readers[user] -= 1
            if readers[user]:
                return
            del readers[user]
            last = not readers
            if last:
                del self._large[id(buffer)], self._sizes[id(buffer)]
        self._users[user] -= len(buffer) + OVERHEAD
        if not self._users[user]:
            del self._users[user]
        if last:
            self.total -= len(buffer) + OVERHEAD

    def make_room(self) -> None:
        """End connections until the total is within its bound: the one that has been at the same buffer for longest.

        While users are over their share it is one of theirs. Only a single large message may exceed a share: its reader
        takes it soon, or is the one that has been at it for longest, or else `sweep` ends it.
        """
        while self.total > self._most and len(self.waiting) > 1:
            over = self._over_share()
            those = [one for one, user in self.waiting.items() if not over or user in over]
            min(those, key=lambda connection: connection.first_since).give_up()

    def _over_share(self) -> set[Hashable]:
        """The users that have more than their share.

        Not one whose only connection has one large message, and besides it no more than anybody may leave unread.
        """
        share, counts = share_of(self._most), Counter(self.waiting.values())
        over = {user for user, size in self._users.items() if size > share}
        largest = dict.fromkeys(over, 0)
        for buffer, readers in self._large.items():
            for user in over & readers.keys():
                largest[user] = max(largest[user], self._sizes[buffer])
        return {
            user
            for user in over
            if counts[user] > 1 or self._users[user] - largest[user] > UNSENT_PAUSE_BYTES
        }

    def sweep(self) -> None:
        """End who has read nothing for too long."""
        before = time.monotonic() - UNREAD_SECONDS
        for connection in [one for one in self.waiting if one.unread_since < before]:
            connection.give_up()
