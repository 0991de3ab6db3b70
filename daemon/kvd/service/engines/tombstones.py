"""Names of what is gone, in the order in which it went: remembered for a time, and only so many of each user."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator


class Tombstones:
    """Names of what is gone. Of each user the last ``most`` are remembered: nobody pushes out another user's."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._all: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._of: dict[int, OrderedDict[str, None]] = {}
        self._over: dict[str, None] = {}

    def add(self, name: str, uid: int) -> None:
        """It has just gone."""
        self.discard(name)
        self._all[name] = uid, time.time()
        names = self._of.setdefault(uid, OrderedDict())
        names[name] = None
        if len(names) > self.most:
            oldest = next(iter(names))
            self.discard(oldest)
            self._over[oldest] = None

    def discard(self, name: str) -> None:
        """It is back, or forgotten already."""
        self._over.pop(name, None)
        if (known := self._all.pop(name, None)) is None:
            return
        names = self._of[known[0]]
        del names[name]
        if not names:
            del self._of[known[0]]

    def forgotten(self, before: float) -> Iterator[str]:
        """What is to be forgotten: what went before that Unix time, and what was too much. Each is told once."""
        while self._over:
            yield self._over.popitem()[0]
        while self._all:
            name, (_, since) = next(iter(self._all.items()))
            if since >= before:
                return
            self.discard(name)
            yield name
