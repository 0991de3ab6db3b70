"""Lines for a few places, fair between those on whose account somebody stands in them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from contextvars import ContextVar
from typing import Generic, TypeVar

from kvd.service.sockets.limits import share_of

T = TypeVar("T", bound=Hashable)

ASKER: ContextVar[Hashable] = ContextVar("ASKER", default="kvd")
"""The user, key or address whose message is being handled. What that causes later, in tasks, is on its account too."""


class LineFull(Exception):
    """So many wait already."""


class FairLines(Generic[T]):
    """``places`` are taken at a time, ``most`` wait for one; an asker has three quarters of both at most.

    Several may have asked for one thing: it waits in the line of each.
    """

    def __init__(self, places: int, most: int) -> None:
        self._places, self._most = places, most
        self._lines: OrderedDict[Hashable, OrderedDict[T, None]] = OrderedDict()
        self._taken: Counter[Hashable] = Counter()

    def put(self, item: T, asker: Hashable) -> None:
        """It waits, if it does not already. Raises `LineFull`, which says how many do."""
        line = self._lines.get(asker, OrderedDict())
        if item in line:
            return
        for count, most, whose in (
            (len(line), share_of(self._most), " for one user or host"),
            (sum(map(len, self._lines.values())), self._most, ""),
        ):
            if count >= most:
                raise LineFull(f"{count} wait{whose} already")
        line[item] = None
        self._lines[asker] = line

    def drop(self, item: T) -> None:
        """It waits no more."""
        for asker, line in list(self._lines.items()):
            line.pop(item, None)
            if not line:
                del self._lines[asker]

    def take(self) -> tuple[T, Hashable] | None:
        """The next one and on whose account it has a place now, until `done`; None where there is no place."""
        if self._taken.total() >= self._places:
            return None
        for asker, line in self._lines.items():
            if self._taken[asker] < share_of(self._places):
                item = next(iter(line))
                self._lines.move_to_end(asker)
                self._taken[asker] += 1
                self.drop(item)
                return item, asker
        return None

    def done(self, asker: Hashable) -> None:
        """A place of its is free."""
        self._taken[asker] -= 1
        if not self._taken[asker]:
            del self._taken[asker]
