"""The shape of a small card, made in kvd: a pair of engines that is known then needs no process that compares.

Nothing is believed for it: the shape is made of the card's own bytes, as the comparing process makes it. It is a
digest, and says nothing of whether a geometry is good. That is found when the pair is compared, and two of one shape
are good, or not, together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator

from kvd.geometry.alike import ShapeReader, cut
from kvd.geometry.errors import GeometryError
from kvd.service.engines.shape import engine_shape
from kvd.service.slices import Slices, paced
from kvd.wire.identity import EngineCard, WorkerCard

DOCUMENT_BYTES = 32 << 10
"""Most of one worker's geometry: so many bytes of regions of a digit take 2.4 ms, a slice. 80 layers have 5 KB."""
GEOMETRY_BYTES = 512 << 10
"""Most of all geometries of a card. 64 workers of 80 layers have 310 KB and take 1 ms; the worst card takes 40 ms, in
slices. What is larger goes to the process: for it, asking there is the smaller part of the time."""


class CardShapes:
    """Makes shapes of cards, one at a time and one each turn of the loop, however many arrive together.

    Those whose cards they are have their turns one after the other.
    """

    def __init__(self) -> None:
        self._slices = Slices()

    async def find(self, card: EngineCard, whose: Hashable) -> str:
        """The card's shape; empty where it is not small, or of a form that takes a closer look to say what it is.

        ``whose`` is the host or user of which it is.
        """
        if not _small(card):
            return ""
        async with self._slices.turn((whose, None)):
            found = [shape async for shape in paced(_worker_shapes(card))]
            await asyncio.sleep(0)
        return engine_shape(card.engine, found) if len(found) == len(card.workers) else ""


def _small(card: EngineCard) -> bool:
    sizes = [len(worker.geometry) for worker in card.workers]
    return bool(sizes) and max(sizes) <= DOCUMENT_BYTES and sum(sizes) <= GEOMETRY_BYTES


def _worker_shapes(card: EngineCard) -> Iterator[tuple[str, str]]:
    """Backend and shape of each worker, up to the first that is not plain."""
    reader = ShapeReader()
    for worker in card.workers:
        if not (shape := _worker_shape(worker, reader)):
            return
        yield worker.backend, shape


def _worker_shape(worker: WorkerCard, reader: ShapeReader) -> str:
    try:
        found = reader.read(*cut(worker.geometry))
    except GeometryError:
        return ""
    return found.shape if found is not None and found.rank == worker.rank else ""
