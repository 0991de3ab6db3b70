"""Parts of large cards on their way to other kvds: some at a time, hosts in turn."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Hashable

from kvd.service.errors import RequestRefused
from kvd.service.sockets.fair_lines import ASKER, FairLines, LineFull

LARGE_ENGINE = 64
"""Cards of no more workers need no place: they have 800 KB with 80 layers."""
MOST_GIVEN = 32
"""Parts at a time: with 1 MiB each half of what may wait to be read in all, over which connections end."""
MOST_WAITING = 4096
LOOK_SECONDS = 0.01
"""How often it is looked whether a part has left."""
GIVEN_SECONDS = 1.0
"""How long one that does not read has its place; the part itself waits on for it."""


class PartsGiven:
    """Places for parts. ``unsent`` is how many bytes wait on a connection, by its route."""

    def __init__(self, unsent: Callable[[bytes], int]) -> None:
        self._unsent = unsent
        self._lines: FairLines[tuple[int, bytes]] = FairLines(MOST_GIVEN, MOST_WAITING)
        self._turns: dict[tuple[int, bytes], asyncio.Future[None]] = {}
        self._ids = itertools.count()

    async def turn(self, route: bytes) -> None:
        """Return when a part is to be sent over a connection, at once. Raises `RequestRefused`."""
        item = next(self._ids), route
        try:
            self._lines.put(item, ASKER.get())
        except LineFull as full:
            raise RequestRefused("KVD-BUSY", f"parts of cards: {full}", hint="try again") from None
        turn = self._turns[item] = asyncio.get_running_loop().create_future()
        self._next()
        try:
            await turn
        finally:
            self._lines.drop(item)
            del self._turns[item]

    def _next(self) -> None:
        while (taken := self._lines.take()) is not None:
            item, asker = taken
            if not (turn := self._turns[item]).done():
                turn.set_result(None)
            self._look_later(item[1], asker, time.monotonic() + GIVEN_SECONDS)

    def _look_later(self, route: bytes, asker: Hashable, ends: float) -> None:
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look, route, asker, ends)

    def _look(self, route: bytes, asker: Hashable, ends: float) -> None:
        if self._unsent(route) and time.monotonic() < ends:
            self._look_later(route, asker, ends)
        else:
            self._lines.done(asker)
            self._next()
