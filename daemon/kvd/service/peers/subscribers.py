"""Subscribers: the other kvds that use engines of ours, so that they can be told when one ends."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.service.engines.local_engine import LocalEngine
from kvd.service.engines.registry import Registry
from kvd.wire.frame import Message
from kvd.wire.handshake import EngineEnded, Ping

GIVEN_SECONDS = 5.0
"""For this long a card that was given out counts as in use, though a ping that crossed it does not say so."""
FORGET_SECONDS = 30.0
"""A subscriber that has not pinged for this long is forgotten; its next ping brings it back."""
PRUNE_SECONDS = 1.0
MOST = 8192
"""Most subscribers that are remembered; the one that was silent for longest goes first."""
MOST_USED = 1024
"""Most engines of ours that one of them may say it uses; what comes after these is not looked at."""


@dataclass(slots=True)
class Subscriber:
    """One other kvd: the engines (id, generation) of ours that it uses, and when it was given each card.

    ``heard`` and the times in ``given`` are time.monotonic(). ``key`` is its host's, empty where peers have none.
    """

    kvd_id: str
    key: bytes = b""
    using: set[tuple[str, str]] = field(default_factory=set)
    heard: float = field(default_factory=time.monotonic)
    given: dict[tuple[str, str], float] = field(default_factory=dict)


class Subscribers:
    """The other kvds, by their route on the peer socket."""

    def __init__(self) -> None:
        self._by_route: OrderedDict[bytes, Subscriber] = OrderedDict()
        self._pruned = time.monotonic()

    def described(self, route: bytes, kvd_id: str, engine: LocalEngine, key: bytes = b"") -> None:
        """A card was given out."""
        now = time.monotonic()
        subscriber = self._by_route.get(route) or Subscriber(kvd_id, key)
        self._put(route, subscriber)
        pair = engine.facts.engine_id, engine.generation
        if pair in subscriber.using or len(subscriber.using) < MOST_USED:
            subscriber.using.add(pair)
            subscriber.given[pair] = now

    def pinged(
        self, route: bytes, ping: Ping, registry: Registry, key: bytes = b""
    ) -> tuple[tuple[str, str], ...]:
        """Take note of what the peer uses; returns the part of it that is gone."""
        now = time.monotonic()
        self._prune(now)
        before = self._by_route.get(route)
        given = {pair: at for pair, at in before.given.items() if now - at < GIVEN_SECONDS} if before else {}
        using = ping.using[:MOST_USED]
        self._put(route, Subscriber(ping.kvd_id, key, {*using, *given}, now, given))
        return tuple(pair for pair in using if registry.ended(*pair))

    def _put(self, route: bytes, subscriber: Subscriber) -> None:
        """The newest stands last."""
        self._by_route[route] = subscriber
        self._by_route.move_to_end(route)
        if len(self._by_route) > MOST:
            self._by_route.popitem(last=False)

    def _prune(self, now: float) -> None:
        if now - self._pruned < PRUNE_SECONDS:
            return
        self._pruned = now
        for route, subscriber in list(self._by_route.items()):
            if now - subscriber.heard > FORGET_SECONDS:
                del self._by_route[route]

    def uses(self, key: bytes, engine_id: str) -> bool:
        """Whether the host of that key uses an engine of ours, in whatever generation."""
        return any(
            used == engine_id
            for subscriber in self._by_route.values()
            if subscriber.key == key
            for used, _ in subscriber.using
        )

    def forget_key(self, key: bytes) -> None:
        """The host of that key is trusted no longer, and told nothing any more."""
        for route in [route for route, one in self._by_route.items() if one.key == key]:
            del self._by_route[route]

    def users(self, engine: LocalEngine) -> list[str]:
        """Ids of the kvds that use an engine's present generation."""
        wanted = (engine.facts.engine_id, engine.generation)
        return sorted(
            {subscriber.kvd_id for subscriber in self._by_route.values() if wanted in subscriber.using}
        )

    def engine_ended(
        self, engine_id: str, generation: str, reason: str, send: Callable[[bytes, Message], None]
    ) -> None:
        """Tell all that use that generation."""
        for route, subscriber in self._by_route.items():
            if (engine_id, generation) in subscriber.using:
                subscriber.using.discard((engine_id, generation))
                subscriber.given.pop((engine_id, generation), None)
                send(route, EngineEnded(engine_id=engine_id, generation=generation, reason=reason))
