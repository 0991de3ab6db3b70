"""Discovery: fetches the engines of configured peers ahead of the first request, so that no request pays for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.service.engines.local_engine import LocalEngine
from kvd.service.engines.registry import Registry
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.peers.handshakes import Handshakes
from kvd.service.peers.link import PeerLink
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.peer_engine import complementary
from kvd.service.slices import paced
from kvd.wire.codes import RefusalCode
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint
from kvd.wire.query import EngineList, EngineRow, ListEngines

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
SETTLED_LOOKS = 30
"""So many times longer is the pause where nothing is left to do, and whatever changes is told of."""
FULL_SECONDS = 25.0
"""How old the list of another kvd's engines may be, whatever it tells of changes."""
MOST_ROWS = 1024
"""Most engines of one other kvd that are looked at."""
SETTLED: frozenset[RefusalCode] = frozenset({"KVD-INCOMPATIBLE", "KVD-COMPARE-LIMIT", "KVD-PEER-CARD"})
"""Refusals that the next look will not change."""
AGAIN_SECONDS = 60.0
"""Two generations that were refused are tried again after this long: what is refused in error must not stay so."""


def warn(text: str) -> None:
    """Tell the log what is wrong with a kvd in ``peer.connect``."""
    log.warning("peer.connect: %s", text)


def every_second() -> float:
    """The pause between two looks at one other kvd, while something is left to do there."""
    return LOOK_SECONDS


@dataclass(frozen=True, slots=True)
class Looking:
    """How another kvd is looked at. ``preferred``: the operator wrote it down, so its cards come before others'."""

    preferred: bool = True
    warn: Callable[[str], None] = warn
    pause: Callable[[], float] = every_second


WRITTEN_DOWN = Looking()


async def discover(
    endpoint: Endpoint,
    links: PeerLinks,
    handshakes: Handshakes,
    registry: Registry,
    looking: Looking = WRITTEN_DOWN,
) -> None:
    """Until cancelled: hand each engine that is up behind ``endpoint`` to each local engine that may need it.

    The other kvd says when its engines change, and is not asked before. Local engines that come up wake this too.
    """
    seen = _SeenEngines(endpoint)
    if looking.preferred:
        handshakes.trusted.add(endpoint)
    told = False
    try:
        with handshakes.looks.at(endpoint) as woken:
            while True:
                woken.clear()
                if not (trusted := links.trusts(endpoint)) and not told:
                    looking.warn(str(links.missing(endpoint)))
                told = not trusted
                settled = False
                try:
                    if trusted:
                        settled = await seen.look(links, handshakes, registry)
                except PeerAway as away:
                    log.debug("%s", away.message)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(looking.pause() * (SETTLED_LOOKS if settled else 1)):
                        await woken.wait()
    finally:
        handshakes.trusted.discard(endpoint)


@dataclass(slots=True)
class _SeenEngines:
    """The engines of another kvd as they were seen last, and the pairs that were refused, with when."""

    endpoint: Endpoint
    rows: list[EngineRow] = field(default_factory=list)
    of: tuple[str, int] = ("", 0)
    """The other kvd's generation, and its number of changes."""
    at: float = 0.0
    refused: dict[tuple[str, str], float] = field(default_factory=dict)

    async def look(self, links: PeerLinks, handshakes: Handshakes, registry: Registry) -> bool:
        """Hand over what is there and was not. Whether all was done, and more will be told of. Raises `PeerAway`."""
        link = links.get(self.endpoint)
        if link.state != "up":
            return False  # whoever comes up wakes this
        if links.leads_here(self.endpoint):
            return True
        now, of = time.monotonic(), (link.generation, link.changes)
        if not link.changes or of != self.of or now - self.at > FULL_SECONDS:
            self.rows = await _rows(link) if link.engines or not link.changes else []
            self.of, self.at = of, now
        done = await self._introduce(handshakes, registry)
        return done and bool(link.changes)

    async def _introduce(self, handshakes: Handshakes, registry: Registry) -> bool:
        now, done = time.monotonic(), True
        for pair in [pair for pair, at in self.refused.items() if now - at > AGAIN_SECONDS]:
            del self.refused[pair]
        async for row in paced(self.rows):
            if not (row.local and row.state == "ready" and row.scheduler):
                continue
            for local in _without(row, self.endpoint, handshakes, registry):
                pair = (local.generation, row.generation)
                if pair in self.refused or not local.up:
                    continue
                ask = GetPeer(
                    local_engine=local.facts.engine_id,
                    engine_id=row.engine.engine_id,
                    endpoint=self.endpoint,
                    generation=row.generation,
                )
                try:
                    await handshakes.introduce(ask)
                except RequestRefused as refusal:
                    if refusal.code in SETTLED:
                        self.refused[pair] = now  # said once, in an event
                    else:
                        done, self.of = False, ("", 0)  # it may have changed
                    log.info("%s: %s", self.endpoint.host, refusal.message)
        return done


async def _rows(link: PeerLink) -> list[EngineRow]:
    """The engines of another kvd, page by page. Raises `PeerAway`."""
    rows: list[EngineRow] = []
    after = ""
    while len(rows) < MOST_ROWS:
        answer = await link.ask(ListEngines(after=after), LOOK_SECONDS)
        if not isinstance(answer, EngineList) or not answer.rows:
            break
        rows += answer.rows
        if not (after := answer.more):
            break
    return rows[:MOST_ROWS]


def _without(
    row: EngineRow, endpoint: Endpoint, handshakes: Handshakes, registry: Registry
) -> list[LocalEngine]:
    """The local engines that may need a peer engine and have not been given it: as a rule none."""
    users = handshakes.users(endpoint, row.engine.engine_id, row.generation)
    return [
        local
        for engine_id, local in registry.engines.items()
        if users.get(engine_id) != local.generation
        and local.up
        and complementary(local.facts.role, row.engine.role)
    ]
