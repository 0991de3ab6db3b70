"""A queue that is fair twice: between users, and between the processes of each."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

Path = tuple[Hashable, Hashable]
"""Whose something is: a user and its process, or a key (or address) and nothing more."""


class FairQueue(Generic[T]):
    """Things that wait for their turn. A user with a thousand of them waits no less than one with a single one."""

    def __init__(self) -> None:
        self._users: OrderedDict[Hashable, OrderedDict[Hashable, deque[T]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._users)

    def put(self, path: Path, item: T) -> None:
        """Add ``item`` behind all others of its path."""
        user, process = path
        processes = self._users.get(user)
        if processes is None:
            processes = self._users[user] = OrderedDict()
        items = processes.get(process)
        if items is None:
            items = processes[process] = deque()
        items.append(item)

    def take(self) -> T | None:
        """The next one, taken out; None where there is none."""
        if not self._users:
            return None
        user, processes = self._users.popitem(last=False)
        process, items = processes.popitem(last=False)
        item = items.popleft()
        if items:
            processes[process] = items
        if processes:
            self._users[user] = processes
        return item
