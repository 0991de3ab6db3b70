"""What kvd and the process that compares engines for it say to each other, and its limits."""

from __future__ import annotations

import msgspec

from kvd.wire.handshake import CardPart
from kvd.wire.identity import EngineCard
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


class Found(msgspec.Struct, frozen=True, tag=True):
    """The answer: the shape, or the factors, or why there is neither. The first of a process says that it is there."""

    shape: str = ""
    bad: tuple[RefusalFactor, ...] = ()
    refusal: str = ""


CompareJob = Side | FindShape | CompareSides
