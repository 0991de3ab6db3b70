"""How many requests of whom, and of which kind, may wait for something at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from kvd.service.sockets.limits import (
    MAX_TASKS,
    MAX_TASKS_CONNECTION,
    MAX_TASKS_KIND,
    MAX_TASKS_PROCESS,
    MAX_TASKS_USER,
    MAX_TASKS_USER_KIND,
    MAX_WAITING_BYTES,
    MAX_WAITING_PROCESS_BYTES,
)
from kvd.service.sockets.turns import Path


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that wants to wait: its connection, whose that is, its kind, its bytes."""

    route: bytes
    path: Path
    kind: str
    size: int


class WaitingShares:
    """Counts requests that wait."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._bytes: Counter[Hashable] = Counter()

    def full(self, waiter: Waiter) -> str:
        """Which share is used up, in words; empty where there is room."""
        for key, most, size_most, whose in _shares(waiter):
            if self._counts[key] >= most:
                return f"{most} requests{whose} are waiting already"
            held = self._bytes[key]
            if size_most and held and held + waiter.size > size_most:
                return f"requests{whose} with {held} bytes are waiting already, at most {size_most} may"
        return ""

    def take(self, waiter: Waiter) -> None:
        """It waits from now on."""
        for key, _, _, _ in _shares(waiter):
            self._counts[key] += 1
            self._bytes[key] += waiter.size

    def give_back(self, waiter: Waiter) -> None:
        """It waits no more."""
        for key, _, _, _ in _shares(waiter):
            self._counts[key] -= 1
            self._bytes[key] -= waiter.size
            if not self._counts[key]:
                del self._counts[key], self._bytes[key]


def _shares(waiter: Waiter) -> Iterator[tuple[Hashable, int, int, str]]:
    """What a request counts in: the share's key, its most requests, its most bytes (0: any number), whose it is."""
    user, kind = waiter.path[0], waiter.kind
    yield ("connection", waiter.route), MAX_TASKS_CONNECTION, 0, " of this connection"
    yield ("process", waiter.path), MAX_TASKS_PROCESS, MAX_WAITING_PROCESS_BYTES, " of this process"
    yield ("user's kind", user, kind), MAX_TASKS_USER_KIND, 0, f" of kind {kind} of this user"
    yield ("kind", kind), MAX_TASKS_KIND, 0, f" of kind {kind}"
    yield ("user", user), MAX_TASKS_USER, 0, " of this user"
    yield "all", MAX_TASKS, MAX_WAITING_BYTES, ""
