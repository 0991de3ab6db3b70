"""Parts: the workers at other kvds of engines whose home this one is, and the way to them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.engines.liveness import AWAY_SECONDS
from kvd.service.engines.local_engine import Client
from kvd.service.engines.registry import Registry
from kvd.service.errors import PeerAway
from kvd.service.peers.links import PeerLinks
from kvd.service.sockets.router import Router
from kvd.wire.frame import Message
from kvd.wire.handshake import PeerGone, PeerReady
from kvd.wire.identity import Endpoint
from kvd.wire.part import AskedOfWorker, ForWorker

TELL_SECONDS = 1.0
"""How long a kvd may take to say that a worker was told something."""
AGAIN_SECONDS = 0.1


def route_of(at: Endpoint, incarnation: str) -> bytes:
    """What stands for the connection of a worker at another kvd. No connection here has such a route."""
    return f"{at}/{incarnation}".encode()


class ClientSender:
    """Sends to clients, wherever they are: over the ``local`` socket, or by way of the kvd that they are at."""

    def __init__(self, registry: Registry, local: Router, links: PeerLinks, counters: Counter[str]) -> None:
        self._registry, self._local, self._links, self._counters = registry, local, links, counters
        self._waiting: dict[Endpoint, deque[tuple[Client, PeerReady | PeerGone]]] = {}
        self._tasks = BackgroundTasks()

    def send(self, route: bytes, message: Message) -> None:
        """Send without waiting. A worker at another kvd is told until it knows, or is gone; each in its order."""
        client = self._registry.behind(route)
        if client is None or client.at is None:
            self._local.send(route, message)
        elif isinstance(message, PeerReady | PeerGone):
            if client.at in self._waiting:
                self._waiting[client.at].append((client, message))
                return
            self._waiting[client.at] = deque([(client, message)])
            self._tasks.begin(self._tell(client.at))

    async def ask(self, client: Client, message: Message, seconds: float) -> Message:
        """Ask a client, and wait for its answer. Raises `TimeoutError`."""
        if client.at is None:
            return await self._local.ask(client.route, message, seconds)
        if not isinstance(message, AskedOfWorker):
            raise TypeError(f"no worker at another kvd is asked a {type(message).__name__}")
        try:
            question = ForWorker(incarnation=client.incarnation, message=message)
            return await self._links.get(client.at).ask(question, seconds + TELL_SECONDS)
        except PeerAway as away:
            raise TimeoutError(away.message) from None

    def home_left(self, engine_id: str) -> None:
        """Where no client of an engine is at this kvd any more its home is not here: its workers elsewhere leave."""
        engine = self._registry.engines.get(engine_id)
        if engine is None or any(client.at is None for client in engine.clients):
            return
        for client in tuple(engine.clients):
            self._registry.end(client, "no process of its engine is left at its home")

    async def close(self) -> None:
        """Stop telling."""
        await self._tasks.close()

    async def _tell(self, at: Endpoint) -> None:
        waiting = self._waiting[at]
        try:
            while waiting:
                await self._tell_one(at, *waiting.popleft())
        finally:
            del self._waiting[at]

    async def _tell_one(self, at: Endpoint, client: Client, message: PeerReady | PeerGone) -> None:
        question, until = (
            ForWorker(incarnation=client.incarnation, message=message),
            time.monotonic() + AWAY_SECONDS,
        )
        while client.state != "gone" and time.monotonic() < until:
            try:
                await self._links.get(at).ask(question, TELL_SECONDS)
            except PeerAway:
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return
        if client.state != "gone":
            self._counters["parts.untold"] += 1
