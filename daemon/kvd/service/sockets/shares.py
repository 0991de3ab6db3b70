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
        for (key, most, whose), size_most in zip(
            _shares(waiter), (None, MAX_WAITING_PROCESS_BYTES, None, None, MAX_WAITING_BYTES), strict=True
        ):
            if self._counts[key] >= most:
                return f"{most} requests{whose} are waiting already"
            held = self._bytes[key]
            if size_most is not None and held and held + waiter.size > size_most:
                return f"requests{whose} with {held} bytes are waiting already, at most {size_most} may"
        return ""

    def take(self, waiter: Waiter) -> None:
        """It waits from now on."""
        for key, _, _ in _shares(waiter):
            self._counts[key] += 1
            self._bytes[key] += waiter.size

    def give_back(self, waiter: Waiter) -> None:
        """It waits no more."""
        for key, _, _ in _shares(waiter):
            self._counts[key] -= 1
            self._bytes[key] -= waiter.size
            if not self._counts[key]:
                del self._counts[key], self._bytes[key]


def _shares(waiter: Waiter) -> Iterator[tuple[Hashable, int, str]]:
    yield ("connection", waiter.route), MAX_TASKS_CONNECTION, " of this connection"
    yield ("process", waiter.path), MAX_TASKS_PROCESS, " of this process"
    yield ("kind", waiter.kind), MAX_TASKS_KIND, f" of kind {waiter.kind}"
    yield ("user", waiter.path[0]), MAX_TASKS_USER, " of this user"
    yield "all", MAX_TASKS, ""
