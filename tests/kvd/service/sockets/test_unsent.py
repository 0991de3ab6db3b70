"""How what waits to be sent is counted, and whose connection ends where that is too much."""

from __future__ import annotations

import itertools

from kvd.service.fairness.queue import Path
from kvd.service.sockets.unsent import Unsent

MIB = 1 << 20


class Reader:
    """A connection that reads nothing until it is told to."""

    def __init__(self, counted: Unsent, path: Path) -> None:
        self.path, self.ended = path, False
        self.unread_since = self.first_since = 0.0
        self._counted = counted
        self._buffers: list[bytes] = []

    def send(self, *buffers: bytes) -> None:
        """These wait for it."""
        for buffer in buffers:
            self._counted.add(self, buffer)
            self._buffers.append(buffer)
        self._counted.make_room()

    def flush(self) -> None:
        """It reads all."""
        for buffer in self._buffers:
            self._counted.remove(self, buffer)
        self._buffers.clear()
        del self._counted.waiting[self]

    def give_up(self) -> None:
        """It is over."""
        self.ended = True
        self.flush()


def test_a_large_body_for_many_counts_once_in_all_and_once_for_each_user() -> None:
    counted = Unsent(4 * MIB)
    card = bytes(MIB)
    readers = [Reader(counted, (uid, pid)) for uid, pid in itertools.product(range(3), range(100))]
    for reader in readers:
        reader.send(card)
    assert MIB < counted.total < 2 * MIB
    others = [Reader(counted, (3, pid)) for pid in range(2)]
    for reader in others:
        reader.send(bytes(MIB))
    assert not any(reader.ended for reader in readers + others)
    for reader in readers + others:
        assert counted.total
        reader.flush()
    assert counted.total == 0


def test_a_user_who_takes_all_the_room_loses_its_own_connections() -> None:
    """Whoever reads a little now and then was never the one that had paused for longest: an honest reader was."""
    counted = Unsent(8 * MIB)
    honest = Reader(counted, (1, 1))
    honest.send(bytes(MIB))
    hostile = [Reader(counted, (2, pid)) for pid in range(16)]
    for now, reader in enumerate(hostile, 1):
        reader.unread_since = reader.first_since = float(now)
        reader.send(bytes(MIB))
    assert not honest.ended
    assert [reader.ended for reader in hostile].count(False) == 6
    assert counted.total <= 8 * MIB


def test_a_single_connection_of_many_messages_gives_way_as_several_do() -> None:
    """It reads a buffer now and then, and is never the one that has been at the same for longest."""
    counted = Unsent(8 * MIB)
    honest, hostile = Reader(counted, (1, 1)), Reader(counted, (2, 1))
    hostile.send(*[bytes(16 << 10)] * (7 * MIB >> 14))
    hostile.first_since = 5.0
    honest.send(bytes(2 * MIB))
    assert (honest.ended, hostile.ended) == (False, True)
    assert counted.total <= 3 * MIB


def test_a_single_message_may_be_larger_than_a_share_but_not_wait_for_longest() -> None:
    counted = Unsent(8 * MIB)
    large, slow, last = (Reader(counted, (uid, 1)) for uid in range(3))
    large.first_since, slow.first_since, last.first_since = 3.0, 1.0, 4.0
    slow.send(bytes(MIB))
    large.send(bytes(100), bytes(7 * MIB))
    last.send(bytes(MIB // 2))
    assert (large.ended, slow.ended, last.ended) == (False, True, False)
    last.send(bytes(MIB))
    assert (large.ended, last.ended) == (True, False)


def test_where_nobody_is_over_a_share_the_one_that_is_slowest_at_a_message_goes() -> None:
    counted = Unsent(8 * MIB)
    readers = [Reader(counted, (uid, 1)) for uid in range(4)]
    for reader, since in zip(readers, (4.0, 1.0, 3.0, 2.0), strict=True):
        reader.first_since = since
        reader.send(bytes(2 * MIB))
    assert [reader.ended for reader in readers] == [False, True, False, False]
