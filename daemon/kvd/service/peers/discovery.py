"""Discovery: fetches the engines of configured peers ahead of the first request, so that no request pays for it."""

from __future__ import annotations

import asyncio
import logging

from kvd.service.engines.registry import Registry
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.peers.handshakes import Handshakes, complementary
from kvd.service.peers.links import PeerLinks
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint
from kvd.wire.query import EngineList, ListEngines

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


async def discover(endpoint: Endpoint, links: PeerLinks, handshakes: Handshakes, registry: Registry) -> None:
    """Until cancelled: hand each engine that is up behind ``endpoint`` to each local engine that may need it."""
    refused: set[tuple[str, str]] = set()
    handshakes.trusted.add(endpoint)
    try:
        while True:
            try:
                answer = await links.get(endpoint).ask(ListEngines(), LOOK_SECONDS)
                if isinstance(answer, EngineList):
                    await _introduce(answer, endpoint, handshakes, registry, refused)
            except PeerAway as away:
                log.debug("%s", away.message)
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        handshakes.trusted.discard(endpoint)


async def _introduce(
    engines: EngineList,
    endpoint: Endpoint,
    handshakes: Handshakes,
    registry: Registry,
    refused: set[tuple[str, str]],
) -> None:
    for row in engines.rows:
        for local in list(registry.engines.values()):
            pair = (local.generation, row.generation)
            wanted = row.local and row.state == "ready" and row.scheduler and local.up
            if not wanted or pair in refused or not complementary(local.facts.role, row.engine.role):
                continue
            ask = GetPeer(
                local_engine=local.facts.engine_id,
                engine_id=row.engine.engine_id,
                endpoint=endpoint,
                generation=row.generation,
            )
            try:
                await handshakes.get(ask)
            except RequestRefused as refusal:
                if refusal.code == "KVD-INCOMPATIBLE":
                    refused.add(pair)  # said once, in an event; it stays so for these two generations
                log.info("%s: %s", endpoint.host, refusal.message)
