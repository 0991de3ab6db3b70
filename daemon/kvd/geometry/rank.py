"""A worker's place in its engine: the one type for it, in geometry as on the wire."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

RankPlace: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
"""A rank in one direction, below the size of an engine in it."""
RankName: TypeAlias = Annotated[
    str, msgspec.Meta(description="a worker's place in its engine: tp0, tp1.pp2, tp0.dcp1")
]
"""A rank as documents have it."""


class Rank(msgspec.Struct, frozen=True, array_like=True):
    """A worker's place in its engine. Sorted by (pp, dcp, tp)."""

    tp: RankPlace = 0
    pp: RankPlace = 0
    dcp: RankPlace = 0

    def __str__(self) -> str:
        """``tp1``, ``tp1.pp2``, ``tp0.dcp1``: the axes that are not zero, and always tp."""
        return "".join((f"tp{self.tp}", f".pp{self.pp}" * bool(self.pp), f".dcp{self.dcp}" * bool(self.dcp)))

    def __lt__(self, other: Rank) -> bool:
        return (self.pp, self.dcp, self.tp) < (other.pp, other.dcp, other.tp)
