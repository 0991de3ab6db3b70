"""Long work in slices, between which everybody else gets a turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

SLICE_SECONDS = 0.002
"""How long a slice may take: far below what a heartbeat or another client's question would notice."""

T = TypeVar("T")


class Slices:
    """Answers that are long to make, one at a time: many askers do not make a turn longer, nor hold many answers."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def collect(self, made: Iterable[T]) -> list[T]:
        """What an iterator gives; it works on while the loop turns, so it must bear that things change meanwhile."""
        collected: list[T] = []
        async with self._turn:
            ends = time.monotonic() + SLICE_SECONDS
            for item in made:
                collected.append(item)
                if time.monotonic() >= ends:
                    await asyncio.sleep(0)
                    ends = time.monotonic() + SLICE_SECONDS
        return collected
