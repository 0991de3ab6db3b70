"""Leases that have ended, by name: a message that was sent before the end may arrive after it, and opens none again."""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from kvd.service.fairness.tally import Tally
from kvd.wire.card_parts import text_bytes
from kvd.wire.lease import LeaseEnd

ENDED_KEPT = 10_000
"""Most that are remembered of one user's engines: nobody pushes out another user's."""
ENDED_KEPT_BYTES = 4 << 20
"""Most that their names take, of one user: those of vLLM's requests have 50 characters, the widest 2 KB."""
ENDED_KEPT_SECONDS = 120.0
"""How long at most. A session repeats what is not answered every 5 s, and lists its leases when it comes back."""

LeaseName = tuple[str, str]
"""Engine id and request id."""


class EndedLease(msgspec.Struct, frozen=True, gc=False):
    """How a lease of that owner's incarnation ended, ``at`` time.monotonic(). ``opening`` as in `OpenLease`."""

    incarnation: str
    opening: int
    uid: int
    end: LeaseEnd
    at: float


class EndedLeases:
    """The last end of each name. Methods are for the event loop."""

    def __init__(self) -> None:
        self._all: OrderedDict[LeaseName, EndedLease] = OrderedDict()
        self._of: dict[int, OrderedDict[LeaseName, int]] = {}  # with the bytes that each was counted as
        self._bytes_of: Tally[int] = Tally()

    def add(self, name: LeaseName, ended: EndedLease) -> None:
        """It has just ended."""
        self.discard(name)
        self._all[name] = ended
        mine = self._of.setdefault(ended.uid, OrderedDict())
        mine[name] = text_bytes((*name, ended.incarnation))
        self._bytes_of.add(ended.uid, mine[name])
        while len(mine) > ENDED_KEPT or self._bytes_of[ended.uid] > ENDED_KEPT_BYTES:
            self.discard(next(iter(mine)))
        self._forget_old()

    def get(self, name: LeaseName) -> EndedLease | None:
        """How the last lease of that name ended; None where that is not known, or too long ago."""
        self._forget_old()
        return self._all.get(name)

    def that(self, name: LeaseName, incarnation: str, opening: int) -> EndedLease | None:
        """How that opening by that owner ended; None where it is another one, which was never open here."""
        ended = self.get(name)
        return ended if ended and (ended.incarnation, ended.opening) == (incarnation, opening) else None

    def discard(self, name: LeaseName) -> None:
        """A lease of that name is open now."""
        if (known := self._all.pop(name, None)) is None:
            return
        mine = self._of[known.uid]
        self._bytes_of.add(known.uid, -mine.pop(name))
        if not mine:
            del self._of[known.uid]

    def _forget_old(self) -> None:
        before = time.monotonic() - ENDED_KEPT_SECONDS
        while self._all:
            name, oldest = next(iter(self._all.items()))
            if oldest.at >= before:
                return
            self.discard(name)
