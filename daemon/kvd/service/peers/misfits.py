"""Engines that do not fit: what whoever asks is told, and the event, which comes once for two generations."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from kvd.service.engines.local_engine import LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.peers.compatibility import Factors, next_step
from kvd.service.peers.peer_engine import PeerEngine
from kvd.service.sockets.events import Events

MOST_REFUSED = 4096
"""Most pairs of generations of which it is remembered that an event told their refusal."""


class Misfits:
    """The pairs that were refused."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    def refuse(self, engine: LocalEngine, peer: PeerEngine, bad: Factors) -> None:
        """Raise `RequestRefused` where there are factors that fail between the two."""
        if not bad:
            return
        mine, theirs = engine.facts.engine_id, peer.card.engine.engine_id
        pair = engine.generation, peer.card.generation
        if pair not in self._told:
            self._told[pair] = None
            if len(self._told) > MOST_REFUSED:
                self._told.popitem(last=False)
            factors = ", ".join(f"{f.name}: {f.local} / {f.remote}" for f in bad)
            self._events.emit("handshake.refused", theirs, local=mine, factors=factors)
        named = "; ".join(f"{f.name} is {f.local} here and {f.remote} there" for f in bad)
        raise RequestRefused(
            "KVD-INCOMPATIBLE",
            f"{mine} cannot read from {theirs}: {named}",
            hint=next_step(bad, mine, theirs),
            factors=bad,
        )

    def forget(self, side: Literal[0, 1], generation: str) -> None:
        """A generation ended: of local engines on side 0, of peers on side 1."""
        for pair in [pair for pair in self._told if pair[side] == generation]:
            del self._told[pair]
