"""Many clients are told of one peer at once: some of them each turn of the loop, by what their answers weigh."""

from __future__ import annotations

import asyncio
from collections import deque

TURN_BYTES = 1 << 20
"""Bytes that clients are told in one turn of the loop. So much is written in about a millisecond."""
LEAST_BYTES = 32 << 10
"""What an answer costs at least, in bytes that could be written meanwhile: it is 32 answers a turn at most."""


class Turns:
    """Who asks at a time when few do goes on at once, the others in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._left = TURN_BYTES
        self._ticking = False

    async def take(self, size: int) -> None:
        """Return when somebody may be told ``size`` bytes."""
        loop = asyncio.get_running_loop()
        cost = max(LEAST_BYTES, size)
        if not self._ticking:
            self._ticking = True
            loop.call_soon(self._tick)
        if self._left > 0 and not self._waiting:
            self._left -= cost
            return
        turn = loop.create_future()
        self._waiting.append((turn, cost))
        await turn

    def _tick(self) -> None:
        """Another turn of the loop. A large answer has one of its own."""
        self._left = TURN_BYTES
        while self._waiting and self._left > 0:
            turn, cost = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= cost
        self._ticking = self._left < TURN_BYTES
        if self._ticking:
            asyncio.get_running_loop().call_soon(self._tick)
