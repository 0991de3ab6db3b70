"""Looks: who looks at other kvds for engines sleeps until there may be something to see, and is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.slices import paced
from kvd.wire.identity import Endpoint

AT_A_TIME = 16
"""Looks that are woken in one turn of the loop; each goes through the engines of one kvd."""


class WokenLooks:
    """One event for each other kvd that is looked at."""

    def __init__(self) -> None:
        self._events: dict[Endpoint, asyncio.Event] = {}
        self._again = False
        self._tasks = BackgroundTasks()

    @contextmanager
    def at(self, endpoint: Endpoint) -> Iterator[asyncio.Event]:
        """The event that is set whenever the kvd at ``endpoint`` is to be looked at; one look at a time."""
        event = self._events[endpoint] = asyncio.Event()
        try:
            yield event
        finally:
            if self._events.get(endpoint) is event:
                del self._events[endpoint]

    def wake(self, endpoint: Endpoint) -> None:
        """The kvd there may have something new."""
        if (event := self._events.get(endpoint)) is not None:
            event.set()

    def wake_all(self) -> None:
        """There is somebody new here, to whom whatever others have may be new."""
        if not self._again:
            self._again = True
            self._tasks.begin(self._wake_all())

    async def _wake_all(self) -> None:
        self._again = False
        async for event in paced(list(self._events.values()), AT_A_TIME):
            event.set()
