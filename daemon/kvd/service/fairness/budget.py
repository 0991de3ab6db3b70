"""Shares: how many things of whom, and of what size in all, may be here at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvd.service.fairness.tally import Tally

ALL = "all"
"""The owner of the share that everything counts in."""


class FairShare(NamedTuple):
    """One owner's part of a budget: who that is, also in words, how many things and of what size in all (0: any).

    Something that is larger than a share fits into it when nothing else is there: it could never come else.
    """

    owner: Hashable
    whose: str
    most: int = 0
    size: int = 0


class Budget:
    """What is here now, by owner. One thing usually counts in several shares: its client's, its user's, that of all.

    ``things`` and ``unit`` are what is counted, and in what its size is measured, in words.
    """

    def __init__(self, things: str, unit: str) -> None:
        self.counts: Tally[Hashable] = Tally()
        self.sizes: Tally[Hashable] = Tally()
        self._things, self._unit = things, unit

    def fits(self, share: FairShare, size: int = 0) -> bool:
        """Whether a share has room for one more thing."""
        held = self.sizes[share.owner]
        many = share.most and self.counts[share.owner] >= share.most
        return not many and not (share.size and held and held + size > share.size)

    def full(self, shares: Sequence[FairShare], size: int = 0) -> str:
        """The first share that has no room for one more, as an error says it; empty where all have."""
        share = next((one for one in shares if not self.fits(one, size)), None)
        if share is None:
            return ""
        held = self.sizes[share.owner]
        count = (
            f"{self.counts[share.owner]} {self._things} {share.whose}"
            + f" with {held} {self._unit}" * bool(held)
        )
        bounds = [f"{share.most}"] * bool(share.most) + [f"{share.size} {self._unit}"] * bool(share.size)
        return f"{count} wait already, at most {' and '.join(bounds)} may"

    def take(self, shares: Sequence[FairShare], size: int = 0) -> None:
        """One more is here."""
        for share in shares:
            self.counts.add(share.owner)
            self.sizes.add(share.owner, size)

    def give_back(self, shares: Sequence[FairShare], size: int = 0) -> None:
        """It is here no more."""
        for share in shares:
            self.counts.add(share.owner, -1)
            self.sizes.add(share.owner, -size)
