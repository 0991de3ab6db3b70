"""What kvd and the process that compares engines for it say to each other, and its limits."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvd.wire.handshake import PART_WORKERS, CardPart
from kvd.wire.identity import EngineCard
from kvd.wire.limits import Blob, Count
from kvd.wire.reply import RefusalFactor

CPU_SECONDS = 5.0
"""Time on a processor that one job may take. Comparing two engines of 4,096 workers of 80 layers takes about one."""
MEMORY_BYTES = 384 << 20
"""Memory of its own that the process may have; the same pair takes 150 MB."""
FRAME = 4
"""Bytes before each message that say how long it is."""


class Side(msgspec.Struct, frozen=True, tag=True):
    """A part of the card of one of the two engines; a new job begins with the peer's first."""

    local: bool
    card: EngineCard
    part: CardPart


class FindShape(msgspec.Struct, frozen=True, tag=True):
    """Answer with the peer's shape."""


class CompareSides(msgspec.Struct, frozen=True, tag=True):
    """Answer with the factors that fail between the two sides."""


Positions = Annotated[tuple[Count, ...], Meta(max_length=PART_WORKERS)]


class Exchange(msgspec.Struct, frozen=True, gc=False):
    """Who of two engines exchanges anything with whom, which follows from their shapes.

    ``layout`` is the peer's encoded `EngineLayout`. ``partners`` are of each local worker the peer's workers, by their
    positions in the cards.
    """

    layout: Blob
    partners: Annotated[tuple[Positions, ...], Meta(max_length=PART_WORKERS)]


class Found(msgspec.Struct, frozen=True, tag=True):
    """The answer: the shape, or the factors, or why there is neither. The first of a process says that it is there.

    ``exchange`` is of engines that fit, where it is small and was soon found.
    """

    shape: str = ""
    bad: tuple[RefusalFactor, ...] = ()
    refusal: str = ""
    exchange: Exchange | None = None


CompareJob = Side | FindShape | CompareSides
