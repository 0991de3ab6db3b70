"""Long work in slices, between which everybody else gets a turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

SLICE_SECONDS = 0.002
"""How long a slice may take: far below what a heartbeat or another client's question would notice."""

T = TypeVar("T")


class Slices:
    """Answers that are long to make, one at a time: many askers do not make a turn longer, nor hold many answers."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def collect(self, made: Iterable[T | None]) -> list[T]:
        """What an iterator gives, without the Nones that it gives while it looks for the next.

        The loop turns meanwhile, so the iterator must bear that what it goes by changes between two items.
        """
        collected: list[T] = []
        async with self._turn:
            ends = time.monotonic() + SLICE_SECONDS
            for item in made:
                if item is not None:
                    collected.append(item)
                if time.monotonic() >= ends:
                    await asyncio.sleep(0)
                    ends = time.monotonic() + SLICE_SECONDS
        return collected


def spread(items: Iterable[T], act: Callable[[T], None]) -> None:
    """Do something with each item, the first slice of it now and one each turn of the loop.

    With the last item all of it is let go, ``act`` and what that refers to. A function within this one that calls for
    itself would refer to itself: each worker that goes would be kept, with its card, until circles are looked for.
    """
    _some(iter(items), act)


def _some(rest: Iterator[T], act: Callable[[T], None]) -> None:
    ends, more = time.monotonic() + SLICE_SECONDS, True
    try:
        for item in rest:
            act(item)
            if time.monotonic() >= ends:
                return
        more = False
    finally:  # also after an error: that of one item is none of the others'
        if more:
            asyncio.get_running_loop().call_soon(_some, rest, act)
