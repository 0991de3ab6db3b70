"""Who of two engines exchanges anything with whom, by their shapes: what a worker need not be told of a peer.

It is found where the two are compared (`kvd.service.peers.comparer`). Where it is not known, as of large engines,
workers are told whole cards.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from kvd.service.peers.comparer.messages import Exchange
from kvd.wire.card_parts import outlined
from kvd.wire.handshake import CardOutline
from kvd.wire.identity import EngineCard

KEPT_BYTES = 16 << 20
"""Most that partners take, and as much for layouts: a pair of 8 and 8 ranks has 1 and 20 KB, of 64 and 64 5 and 25."""

Partners = tuple[tuple[int, ...], ...]


class Exchanges:
    """Partners by the shapes of two engines, local first, and layouts by shape. Those used last are kept."""

    def __init__(self) -> None:
        self._partners: OrderedDict[tuple[str, str], Partners] = OrderedDict()
        self._layouts: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = self._layout_bytes = 0

    def keep(self, pair: tuple[str, str], found: Exchange) -> None:
        """Remember what was found of two shapes; what was longest of no use goes where that is too much."""
        if pair not in self._partners:
            self._bytes += _size(found.partners)
        if pair[1] not in self._layouts:
            self._layout_bytes += len(found.layout)
        self._partners.setdefault(pair, found.partners)
        self._layouts.setdefault(pair[1], found.layout)
        while self._bytes > KEPT_BYTES:
            self._bytes -= _size(self._partners.popitem(last=False)[1])
        while self._layout_bytes > KEPT_BYTES:
            self._layout_bytes -= len(self._layouts.popitem(last=False)[1])

    def outline(self, shapes: tuple[str, str], position: int, card: EngineCard) -> CardOutline | None:
        """The peer's card for the local worker in that position, None where it is not known what that one needs."""
        partners, layout = self._partners.get(shapes), self._layouts.get(shapes[1])
        if partners is None or layout is None or position >= len(partners):
            return None
        self._partners.move_to_end(shapes)
        self._layouts.move_to_end(shapes[1])
        return outlined(card, shapes[1], layout, partners[position])


def _size(partners: Partners) -> int:
    return sys.getsizeof(partners) + sum(map(sys.getsizeof, partners))
