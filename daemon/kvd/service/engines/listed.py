"""A list that many ask for at a time is made once for all of them, and kept for a moment or until it is another one."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from kvd.wire.query import EngineList, ListEngines

KEPT_SECONDS = 0.2
"""A fleet of a thousand asks so often that making the list for each would take all of a processor."""


class Listed:
    """The engines of this host as other kvds are told of them: the first page, without cards."""

    def __init__(self) -> None:
        self._made = EngineList(rows=())
        self._until = 0.0
        self._changes = -1

    async def get(
        self, question: ListEngines, changes: int, make: Callable[[], Awaitable[EngineList]]
    ) -> EngineList:
        """The answer, at most `KEPT_SECONDS` old; other questions than that for the first page are not kept.

        ``changes`` counts engines that came up or ended. Whoever was told of one gets a list that was made after it.
        """
        if question != ListEngines():
            return await make()
        now = time.monotonic()
        if changes == self._changes and now < self._until:
            return self._made
        made = await make()
        if changes >= self._changes:  # else somebody has made a newer one meanwhile
            self._made, self._until, self._changes = made, now + KEPT_SECONDS, changes
        return made
