"""Greetings: peers that are handed to local engines ahead of their first request, a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint

log = logging.getLogger(__name__)

AT_A_TIME = 64
"""Greetings that are under way at a time; others wait."""
MOST = 8192
"""Most greetings that wait: 64 local engines that are given 128 peers each. Others are dropped and counted; the first
request fetches the peer then."""
MOST_OF_ONE = 1024
"""Most of them to engines of one kvd."""


class Greetings:
    """Peers on their way to engines that did not ask."""

    def __init__(self, introduce: Callable[[GetPeer], Awaitable[None]], counters: Counter[str]) -> None:
        self._introduce = introduce
        self._counters = counters
        self._under_way: dict[GetPeer, asyncio.Task[None]] = {}
        self._of: Tally[Endpoint] = Tally()
        self._room = asyncio.Semaphore(AT_A_TIME)

    def greet(self, ask: GetPeer) -> None:
        """Hand over the peer that ``ask`` names, soon; not twice at a time."""
        if ask in self._under_way:
            return
        if len(self._under_way) >= MOST or self._of[ask.endpoint] >= MOST_OF_ONE:
            self._counters["handshakes.greetings_dropped"] += 1
            return
        self._of.add(ask.endpoint)
        task = asyncio.get_running_loop().create_task(self._give(ask))
        self._under_way[ask] = task
        task.add_done_callback(lambda _: self._given(ask))

    def _given(self, ask: GetPeer) -> None:
        del self._under_way[ask]
        self._of.add(ask.endpoint, -1)

    async def _give(self, ask: GetPeer) -> None:
        async with self._room:
            try:
                await self._introduce(ask)
            except RequestRefused as refusal:
                log.info("%s is not given to %s: %s", ask.engine_id, ask.local_engine, refusal.message)
