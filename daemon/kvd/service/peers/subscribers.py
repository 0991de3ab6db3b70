"""Subscribers: the other kvds that use engines of ours, so that they can be told when one ends."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.engines.local_engine import LocalEngine
from kvd.service.engines.registry import Registry
from kvd.service.slices import paced
from kvd.wire.card_parts import text_bytes
from kvd.wire.frame import Message
from kvd.wire.handshake import EngineEnded, Ping

GIVEN_SECONDS = 5.0
"""For this long a card that was given out counts as in use, though a ping that crossed it does not say so."""
FORGET_SECONDS = 30.0
"""A subscriber that has not pinged for this long is forgotten; its next ping brings it back."""
PRUNE_SECONDS = 1.0
TOGETHER_SECONDS = 0.02
"""Engines that come up within this are told of together."""
MOST = 8192
"""Most subscribers that are remembered; the one that was silent for longest goes first."""
MOST_OF_KEY = 64
"""Most of one host. Its kvd has one connection here; those before it are remembered until they are forgotten."""
EXPECTED_BYTES = 16 << 10
"""Most bytes of names, of what one of them uses and is not back yet after kvd was started."""
MOST_USED = 1024
"""Most engines of ours that one of them may say it uses; what comes after these is not looked at."""


@dataclass(slots=True)
class Subscriber:
    """One other kvd: the generations of engines of ours that it uses, by engine, and when it was given each card.

    Remembered is what is here now, since a peer may name whatever it likes, and after a start a little of what may come
    back: it may come and end between two pings. ``last_heard`` and the times in ``given`` are time.monotonic(). ``key``
    is its host's, empty where peers have none. ``told``: it takes `EnginesChanged`.
    """

    kvd_id: str
    key: bytes = b""
    using: dict[str, str] = field(default_factory=dict)
    last_heard: float = field(default_factory=time.monotonic)
    given: dict[str, float] = field(default_factory=dict)
    told: bool = False


class Subscribers:
    """The other kvds, by their route on the peer socket."""

    def __init__(self) -> None:
        self._by_route: OrderedDict[bytes, Subscriber] = OrderedDict()
        self._of: dict[bytes, OrderedDict[bytes, None]] = {}
        """Routes by key."""
        self._pruned = time.monotonic()
        self._telling = BackgroundTasks()
        self._changed = False

    def described(self, route: bytes, kvd_id: str, engine: LocalEngine, key: bytes = b"") -> None:
        """A card was given out."""
        now = time.monotonic()
        subscriber = self._by_route.get(route) or Subscriber(kvd_id, key)
        self._put(route, subscriber)
        engine_id = engine.facts.engine_id
        if engine_id in subscriber.using or len(subscriber.using) < MOST_USED:
            subscriber.using[engine_id] = engine.generation
            subscriber.given[engine_id] = now

    def pinged(
        self, route: bytes, ping: Ping, registry: Registry, key: bytes = b""
    ) -> tuple[tuple[str, str], ...]:
        """Take note of what the peer uses; returns the part of it that is gone."""
        now = time.monotonic()
        self._prune(now)
        before = self._by_route.get(route) or Subscriber("")
        given = {name: at for name, at in before.given.items() if now - at < GIVEN_SECONDS}
        using = {name: before.using[name] for name in given if name in before.using}
        listed = ping.using[:MOST_USED]
        gone = tuple(pair for pair in listed if registry.ended(*pair))
        room = EXPECTED_BYTES
        for engine_id, generation in set(listed).difference(gone):
            engine = registry.engines.get(engine_id)
            if engine is not None and generation and engine.generation == generation:
                using[engine.facts.engine_id] = engine.generation
            elif engine_id not in using and (size := text_bytes((engine_id, generation))) <= room:
                using[engine_id] = generation
                room -= size
        self._put(route, Subscriber(ping.kvd_id, key, using, now, given, ping.told))
        return gone

    def _put(self, route: bytes, subscriber: Subscriber) -> None:
        """The newest stands last."""
        self._drop(route)
        self._by_route[route] = subscriber
        mine = self._of.setdefault(subscriber.key, OrderedDict())
        mine[route] = None
        if subscriber.key and len(mine) > MOST_OF_KEY:
            self._drop(next(iter(mine)))
        if len(self._by_route) > MOST:
            self._drop(next(iter(self._by_route)))

    def _drop(self, route: bytes) -> None:
        if (one := self._by_route.pop(route, None)) is None:
            return
        mine = self._of[one.key]
        del mine[route]
        if not mine:
            del self._of[one.key]

    def _prune(self, now: float) -> None:
        if now - self._pruned < PRUNE_SECONDS:
            return
        self._pruned = now
        for route, subscriber in list(self._by_route.items()):
            if now - subscriber.last_heard > FORGET_SECONDS:
                self._drop(route)

    def uses(self, key: bytes, engine_id: str) -> bool:
        """Whether the host of that key uses an engine of ours, in whatever generation."""
        return any(engine_id in self._by_route[route].using for route in self._of.get(key, ()))

    def forget_key(self, key: bytes) -> None:
        """The host of that key is trusted no longer, and told nothing any more."""
        for route in tuple(self._of.get(key, ())):
            self._drop(route)

    def users(self, engine: LocalEngine) -> list[str]:
        """Ids of the kvds that use an engine's present generation."""
        engine_id, generation = engine.facts.engine_id, engine.generation
        return sorted(
            {one.kvd_id for one in self._by_route.values() if one.using.get(engine_id) == generation}
        )

    def engines_changed(self, changed: Callable[[], Message], send: Callable[[bytes, Message], None]) -> None:
        """Tell all others that engines here changed: once, soon, where several do."""
        if not self._changed:  # else what is about to be told has this too
            self._changed = True
            self._telling.begin(self._tell(changed, send))

    async def _tell(self, changed: Callable[[], Message], send: Callable[[bytes, Message], None]) -> None:
        await asyncio.sleep(TOGETHER_SECONDS)
        self._changed = False
        message = changed()
        async for route in paced([route for route, one in self._by_route.items() if one.told]):
            send(route, message)

    def engine_ended(
        self, engine_id: str, generation: str, reason: str, send: Callable[[bytes, Message], None]
    ) -> None:
        """Tell all that use that generation."""
        for route, subscriber in self._by_route.items():
            if subscriber.using.get(engine_id) == generation:
                del subscriber.using[engine_id]
                subscriber.given.pop(engine_id, None)
                send(route, EngineEnded(engine_id=engine_id, generation=generation, reason=reason))
