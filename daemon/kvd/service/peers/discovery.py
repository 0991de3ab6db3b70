"""Discovery: fetches the engines of configured peers ahead of the first request, so that no request pays for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvd.service.engines.local_engine import LocalEngine
from kvd.service.engines.registry import Registry
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.peers.handshakes import Handshakes, complementary
from kvd.service.peers.links import PeerLinks
from kvd.service.slices import SLICE_SECONDS
from kvd.wire.codes import RefusalCode
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint
from kvd.wire.query import EngineList, EngineRow, ListEngines

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
PING_SECONDS = 0.02
"""How often it is looked whether the first ping was answered, which is sent as soon as there is a connection."""
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
    """The pause between two looks at one other kvd."""
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
    """Until cancelled: hand each engine that is up behind ``endpoint`` to each local engine that may need it."""
    refused: dict[tuple[str, str], float] = {}
    if looking.preferred:
        handshakes.trusted.add(endpoint)
    told = False
    try:
        while True:
            if not (trusted := links.trusts(endpoint)) and not told:
                looking.warn(str(links.missing(endpoint)))
            told = not trusted
            try:
                rows = await _rows(endpoint, links)
                if await _is_another(endpoint, links):
                    await _introduce(rows, endpoint, handshakes, registry, refused)
            except PeerAway as away:
                log.debug("%s", away.message)
            await asyncio.sleep(looking.pause())
    finally:
        handshakes.trusted.discard(endpoint)


async def _is_another(endpoint: Endpoint, links: PeerLinks) -> bool:
    """Whether another kvd than this one answers there, as its first answer to a ping says."""
    ends = time.monotonic() + LOOK_SECONDS
    while (here := links.leads_here(endpoint)) is None and time.monotonic() < ends:  # noqa: ASYNC110 - a link announces nothing
        await asyncio.sleep(PING_SECONDS)
    return here is False


async def _rows(endpoint: Endpoint, links: PeerLinks) -> list[EngineRow]:
    """The engines of another kvd, page by page. Raises `PeerAway`."""
    rows: list[EngineRow] = []
    after = ""
    while len(rows) < MOST_ROWS:
        answer = await links.get(endpoint).ask(ListEngines(after=after), LOOK_SECONDS)
        if not isinstance(answer, EngineList) or not answer.rows:
            break
        rows += answer.rows
        if not (after := answer.more):
            break
    return rows[:MOST_ROWS]


async def _introduce(
    engines: list[EngineRow],
    endpoint: Endpoint,
    handshakes: Handshakes,
    registry: Registry,
    refused: dict[tuple[str, str], float],
) -> None:
    now = time.monotonic()
    for pair in [pair for pair, at in refused.items() if now - at > AGAIN_SECONDS]:
        del refused[pair]
    ends = now + SLICE_SECONDS
    for row in engines:
        if time.monotonic() > ends:
            await asyncio.sleep(0)
            ends = time.monotonic() + SLICE_SECONDS
        if not (row.local and row.state == "ready" and row.scheduler):
            continue
        for local in _without(row, endpoint, handshakes, registry):
            pair = (local.generation, row.generation)
            if pair in refused or not local.up:
                continue
            ask = GetPeer(
                local_engine=local.facts.engine_id,
                engine_id=row.engine.engine_id,
                endpoint=endpoint,
                generation=row.generation,
            )
            try:
                await handshakes.introduce(ask)
            except RequestRefused as refusal:
                if refusal.code in SETTLED:
                    refused[pair] = now  # said once, in an event
                log.info("%s: %s", endpoint.host, refusal.message)


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
