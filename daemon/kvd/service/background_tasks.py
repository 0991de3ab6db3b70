"""Tasks that nobody waits for: held while they run, as the loop itself does not, and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """The tasks of one owner. One that is over is not held: its frame may hold the owner, in a circle."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside whatever else the loop does."""
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    def cancel(self) -> None:
        """Cancel all, and wait for none."""
        for task in self.running:
            task.cancel()

    async def close(self) -> None:
        """Cancel all, and return when none runs any more."""
        self.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
