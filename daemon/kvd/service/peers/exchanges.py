"""Who of two engines exchanges anything with whom, by their shapes: what a worker need not be told of a peer.

It is found where the two are compared (`kvd.service.peers.comparer`). Where it is not known, as of large engines,
workers are told whole cards.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import NamedTuple

from kvd.service.fairness.tally import Tally
from kvd.service.peers.comparer.messages import Exchange
from kvd.service.peers.comparer.pool import Whose
from kvd.wire.card_parts import outlined, text_bytes
from kvd.wire.handshake import CardOutline
from kvd.wire.identity import EngineCard

KEPT_BYTES = 32 << 20
"""Most that they take: a pair of 8 and 8 ranks has 22 KB, of 64 and 64 30 KB, nearly all of it the layout."""
ENTRY_BYTES = 400
"""About what a pair takes besides its shapes, its partners and its layout."""


class _PairFound(NamedTuple):
    """What was found of a pair, and in whose line it waited to be compared."""

    exchange: Exchange
    whose: Whose
    size: int


class Exchanges:
    """What was found of two engines, by their shapes, local first. Those used last are kept, of everybody as much."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], _PairFound] = OrderedDict()
        self._sizes: Tally[Whose] = Tally()

    def keep(self, whose: Whose, pair: tuple[str, str], found: Exchange) -> None:
        """Remember what was found of two shapes.

        Where that is too much, what was longest of no use goes of those whose pairs take most.
        """
        if pair in self._kept:
            self._forget(pair)
        self._kept[pair] = kept = _PairFound(found, whose, _size(pair, found))
        self._sizes.add(whose, kept.size)
        while self._sizes.total > KEPT_BYTES:
            most = max(self._sizes.of, key=lambda one: self._sizes[one])
            self._forget(next(old for old, one in self._kept.items() if one.whose == most))

    def outline(self, shapes: tuple[str, str], position: int, card: EngineCard) -> CardOutline | None:
        """The peer's card for the local worker in that position; None where it is to be told in parts.

        That is where it is not known what the worker needs, and where the outline is large.
        """
        kept = self._kept.get(shapes)
        if kept is None or position >= len(kept.exchange.partners):
            return None
        self._kept.move_to_end(shapes)
        return outlined(card, shapes[1], kept.exchange.layout, kept.exchange.partners[position])

    def _forget(self, pair: tuple[str, str]) -> None:
        kept = self._kept.pop(pair)
        self._sizes.add(kept.whose, -kept.size)


def _size(pair: tuple[str, str], found: Exchange) -> int:
    partners = sys.getsizeof(found.partners) + sum(map(sys.getsizeof, found.partners))
    return ENTRY_BYTES + text_bytes(pair) + partners + len(found.layout)
