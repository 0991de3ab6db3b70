"""A worker's place in its engine: the one type for it, in geometry as on the wire."""

from __future__ import annotations

import msgspec


class Rank(msgspec.Struct, frozen=True, array_like=True):
    """A worker's place in its engine. Sorted by (pp, dcp, tp)."""

    tp: int = 0
    pp: int = 0
    dcp: int = 0

    def __str__(self) -> str:
        """``tp1``, ``tp1.pp2``, ``tp0.dcp1``: the axes that are not zero, and always tp."""
        return "".join((f"tp{self.tp}", f".pp{self.pp}" * bool(self.pp), f".dcp{self.dcp}" * bool(self.dcp)))

    def __lt__(self, other: Rank) -> bool:
        return (self.pp, self.dcp, self.tp) < (other.pp, other.dcp, other.tp)
