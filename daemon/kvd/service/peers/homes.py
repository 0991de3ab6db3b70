"""Homes: the kvds that put together engines of which workers are registered here, and what they are told of these.

Level-triggered: each home is told, twice a second and at every change, which of its workers live here. Whatever it does
not know is presented again, so it may be killed at any moment, and so may this kvd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.engines.liveness import AWAY_SECONDS
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.engines.registry import Registry
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.peers.links import PeerLinks
from kvd.service.sockets.events import Events
from kvd.shown import brief
from kvd.wire.frame import Message
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.part import MOST_OF_PART, JoinWorker, PartAlive, PartHeard, PartWorker
from kvd.wire.reply import Refused

log = logging.getLogger(__name__)

Located = Callable[[str, Endpoint, str], Awaitable[object]]

ALIVE_SECONDS = 0.5
"""How often a home is told which workers live: several times before it would take them to be gone."""
ANSWER_SECONDS = 1.0
LEAST_PAUSE_SECONDS = 0.02
MOST_GONE = 4096
"""Workers that have gone and that a home is still to hear of. One that it does not hear of it misses by itself."""


@dataclass(slots=True)
class _Home:
    """One home: the workers of its engines that live here, those of them that it knows, and those that have gone.

    ``refused`` has why it does not take workers, by engine. ``last_heard`` is the time.monotonic() of its last answer.
    ``revision`` counts changes: an answer to what was said before one is not about it.
    """

    endpoint: Endpoint
    workers: dict[str, Client] = field(default_factory=dict)
    joined: set[str] = field(default_factory=set)
    gone: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    last_heard: float = field(default_factory=time.monotonic)
    revision: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Homes:
    """The homes of local workers' engines, as far as they are other kvds. ``me`` is where these reach this one.

    ``located`` fetches an engine, by its id, from the kvd that describes it, in its present generation.
    """

    def __init__(
        self, me: Endpoint, registry: Registry, links: PeerLinks, events: Events, located: Located
    ) -> None:
        self._me, self._registry, self._links, self._events = me, registry, links, events
        self._located = located
        self._homes: dict[Endpoint, _Home] = {}
        self._tasks = BackgroundTasks()

    def registered(self, client: Client, at: Endpoint) -> None:
        """A worker whose engine has its home at another kvd is here, or here again."""
        home = self._homes.get(at)
        if home is None:
            home = self._homes[at] = _Home(at)
            self._tasks.begin(self._keep(home))
        known = home.workers.get(client.incarnation)
        home.workers[client.incarnation] = client
        home.gone.pop(client.incarnation, None)
        if known is None:
            _change(home)

    def client_gone(self, client: Client) -> None:
        """A client has ended, perhaps one that a home knows."""
        home = self._homes.get(client.home or HERE)
        if home is not None and home.workers.pop(client.incarnation, None) is not None:
            home.joined.discard(client.incarnation)
            home.gone[client.incarnation] = client.reason
            if len(home.gone) > MOST_GONE:
                del home.gone[next(iter(home.gone))]
            _change(home)

    def look_up(self, engine: LocalEngine, home: Endpoint) -> None:
        """An engine is ready: fetch the whole of its card, for the ledger and for operators."""
        self._tasks.begin(self._fetch(engine.facts.engine_id, home, engine.generation))

    async def close(self) -> None:
        """Say no more. The workers live, and their home waits for the next kvd."""
        await self._tasks.close()

    async def _fetch(self, engine_id: str, home: Endpoint, generation: str) -> None:
        try:
            await self._located(engine_id, home, generation)
        except RequestRefused as refusal:
            log.info("engine %s is not described: %s", engine_id, refusal.message)

    async def _keep(self, home: _Home) -> None:
        while home.workers or home.gone:
            home.changed.clear()
            began = time.monotonic()
            try:
                await self._present(home)
                await self._say_who_lives(home)
            except PeerAway as away:
                self._away(home, f"its home does not answer: {away.message}")
            except Exception:
                # A mistake of ours, in one worker's card perhaps. This task is all that the home ever hears of its
                # workers here: were it to end, they would be gone there within AWAY_SECONDS, and until kvd restarts.
                # All is told anew in the next round, so nothing of this one is relied on.
                self._events.counters["errors.internal"] += 1
                log.exception("what is told to the kvd at %s failed; going on", home.endpoint)
            with contextlib.suppress(TimeoutError):
                pause = max(LEAST_PAUSE_SECONDS, began + ALIVE_SECONDS - time.monotonic())
                async with asyncio.timeout(pause):
                    await home.changed.wait()
        del self._homes[home.endpoint]

    async def _present(self, home: _Home) -> None:
        """Present the workers that the home does not know. Raises `PeerAway`."""
        if home.refused:
            here = {client.engine.engine_id for client in home.workers.values()}
            home.refused = {engine_id: why for engine_id, why in home.refused.items() if engine_id in here}
        for incarnation, client in list(home.workers.items()):
            if incarnation in home.joined or client.state == "gone" or client.card is None:
                continue
            answer = await self._ask(home, JoinWorker(endpoint=self._me, card=client.card))
            engine_id = client.engine.engine_id
            if isinstance(answer, PartHeard):
                home.refused.pop(engine_id, None)
                if incarnation in home.workers:
                    home.joined.add(incarnation)
            elif isinstance(answer, Refused):
                why = brief(f"its home at {home.endpoint} does not take {client.name}: {answer.message}")
                if home.refused.get(engine_id) != why:
                    log.info("engine %s: %s", engine_id, why)
                home.refused[engine_id] = why
                self._registry.told_by_home(engine_id, "", why)

    async def _say_who_lives(self, home: _Home) -> None:
        """Tell the home of the workers that it knows, and of those that have gone. Raises `PeerAway`."""
        before, gone = home.revision, dict(home.gone)
        joined = [home.workers[incarnation] for incarnation in home.workers if incarnation in home.joined]
        while joined or gone:
            some, joined = joined[:MOST_OF_PART], joined[MOST_OF_PART:]
            ended = dict(list(gone.items())[:MOST_OF_PART])
            message = PartAlive(
                endpoint=self._me,
                workers=tuple(
                    PartWorker(c.incarnation, c.reason if c.state == "silent" else "") for c in some
                ),
                gone=tuple(PartWorker(*one) for one in ended.items()),
            )
            answer = await self._ask(home, message)
            if not isinstance(answer, PartHeard):
                return
            for incarnation in ended:
                del gone[incarnation]
                home.gone.pop(incarnation, None)
            home.joined.difference_update(answer.unknown)
            if answer.unknown:
                home.changed.set()
            generations = dict(answer.engines)
            for engine_id in {client.engine.engine_id for client in some} if home.revision == before else ():
                why = home.refused.get(engine_id, "")
                self._registry.told_by_home(engine_id, "" if why else generations.get(engine_id, ""), why)

    async def _ask(self, home: _Home, message: Message) -> Message:
        answer = await self._links.get(home.endpoint).ask(message, ANSWER_SECONDS)
        home.last_heard = time.monotonic()
        return answer

    def _away(self, home: _Home, why: str) -> None:
        """A home does not answer. Its last word holds for a while: it may be started anew."""
        lasts = time.monotonic() - home.last_heard <= AWAY_SECONDS
        if not lasts:
            home.gone.clear()  # it takes them to be gone by itself
        for engine_id in {client.engine.engine_id for client in home.workers.values()}:
            engine = self._registry.engines.get(engine_id)
            if engine is not None and not (lasts and engine.told):
                self._registry.told_by_home(engine_id, "", why)


def _change(home: _Home) -> None:
    home.revision += 1
    home.changed.set()
