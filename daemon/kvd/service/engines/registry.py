"""The registry: which workers and schedulers are here, which engines they make up, and when one began or ended."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Mapping
from typing import Protocol

from kvd.service.engines.belonging import refuse_another, refuse_conflict, refuse_stranger
from kvd.service.engines.local_engine import ENDED_KEPT, Client, EngineState, LocalEngine, briefly
from kvd.service.engines.roster import Roster
from kvd.service.engines.tombstones import Tombstones
from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally, beyond
from kvd.service.sockets.events import Events
from kvd.shown import MAX_NAMES, few
from kvd.wire.card_parts import facts_bytes
from kvd.wire.names import generation_of

SCHEDULER_SECONDS = 2.0
"""How long the scheduler of an engine with all its workers is waited for: after a restart of kvd it is near."""
MOST_ENGINES_OF_UID = 10_240
"""Most engines of one user: a host runs 64; tests of size register 10,000 workers, each of an engine of its own."""
MOST_ENGINES = 20_480
"""Most of all users: one user's leave as many for the others."""
MOST_GONE_OF_UID = 1024
"""Most engines of a user that are remembered once they are gone; those before are forgotten."""
LARGE_BYTES = 8192
"""Facts that take more than this are not remembered of an engine that is gone; vLLM's take 2 KB."""


class Watcher(Protocol):
    """Who has to be told of changes; called on the loop, must not wait."""

    def engine_ready(self, engine: LocalEngine) -> None:
        """All workers are here."""

    def engine_up(self, engine: LocalEngine) -> None:
        """All workers and the scheduler are here."""

    def engine_ended(self, engine: LocalEngine, generation: str, reason: str) -> None:
        """That generation will not come back."""

    def engine_forgotten(self, engine: LocalEngine) -> None:
        """It is not even remembered any more."""

    def client_gone(self, client: Client) -> None:
        """A worker or scheduler is no more."""


class Unwatched:
    """A `Watcher` before there is one: nobody has to be told."""

    def engine_ready(self, engine: LocalEngine) -> None:
        """Nothing."""

    def engine_up(self, engine: LocalEngine) -> None:
        """Nothing."""

    def engine_ended(self, engine: LocalEngine, generation: str, reason: str) -> None:
        """Nothing."""

    def engine_forgotten(self, engine: LocalEngine) -> None:
        """Nothing."""

    def client_gone(self, client: Client) -> None:
        """Nothing."""


class Registry:
    """All clients and engines of this host, by incarnation and by engine id.

    ``watcher`` is told of changes. ``settled`` is the time.monotonic() until which workers may not all be back.
    ``roster`` has the clients, ``counts`` how many engines there are by state (``engines.ready``).
    """

    def __init__(self, events: Events, settled: float) -> None:
        self.watcher: Watcher = Unwatched()
        self.settled = settled
        self.roster = Roster()
        self.engines: dict[str, LocalEngine] = {}
        self.counts: Tally[str] = Tally()
        self._living_of: Tally[int] = Tally()
        self._gone = Tombstones(MOST_GONE_OF_UID)
        self._events = events

    @property
    def clients(self) -> Mapping[str, Client]:
        """All clients by incarnation, also those gone that are remembered."""
        return self.roster.by_incarnation

    @property
    def settling(self) -> bool:
        """Whether this kvd is so young that its workers may not all be back."""
        return time.monotonic() < self.settled

    def check(self, client: Client) -> None:
        """Raise `RequestRefused` for who cannot be taken, whatever its card holds: another's place, or too much."""
        known = self.clients.get(client.incarnation)
        if known is not None:
            refuse_another(known, client)
        self.roster.check_size(client, known)
        engine = self.engines.get(client.engine.engine_id)
        if engine is not None and engine.alive:
            refuse_stranger(engine, client)

    def register(self, client: Client) -> LocalEngine:
        """Take a client, new or known.

        Raises `RequestRefused` where it contradicts one that lives or belongs to somebody else, or where there are too
        many.
        """
        known = self.clients.get(client.incarnation)
        if known is not None:
            refuse_another(known, client)
        back = known is not None and known.state != "gone"
        self.roster.check_size(client, known)
        engine, holder = self._place(client, back=back)
        if holder is not None and holder.incarnation != client.incarnation:
            self.end(holder, f"replaced by incarnation {client.incarnation} of process {client.pid}")
        if not engine.alive:
            engine.facts, engine.home, engine.told = client.engine, client.home, ""
        if known is not None and back:
            client.registered = known.registered
        self.roster.add(client)
        engine.take(client)
        if not back:
            self._events.emit(
                f"{client.kind}.registered", client.name, incarnation=client.incarnation, pid=client.pid
            )
        if not (back and engine.generation):
            self._settle(engine, "")
        if engine.up:
            engine.wake()
            if not back:
                self.watcher.engine_up(engine)
        return engine

    def sign_of_life(self, incarnation: str, route: bytes) -> Client | None:
        """A sign of life. None where the incarnation is not known (any more), or not on this connection.

        What was sent on the other connection may be lost with it: the client is to register here and say what it holds.
        """
        client = self.clients.get(incarnation)
        if client is None or client.state == "gone" or client.route != route:
            return None
        if client.state == "silent":
            self.roster.change(client, "alive", "")
            self._events.emit(f"{client.kind}.alive", client.name, incarnation=incarnation)
        self.roster.sign_of_life(client)
        return client

    def silence(self, client: Client, reason: str) -> None:
        """Mark a living client as silent."""
        if client.state == "alive":
            self.roster.change(client, "silent", reason)
            self._events.emit(f"{client.kind}.silent", client.name, reason=reason, pid=client.pid)

    def end(self, client: Client, reason: str, *, ended: bool = False) -> None:
        """A client is no more, where it has ``ended`` for certain. Its engine's generation ends with any worker."""
        if client.state == "gone":
            return
        self.roster.change(client, "gone", reason)
        client.ended = ended
        # It is remembered for operators, who look at no card.
        client.remember_briefly()
        engine = self.engines[client.engine.engine_id]
        engine.lose(client)
        engine.told = ""  # its home hears of it next
        self._events.emit(f"{client.kind}.gone", client.name, reason=reason, pid=client.pid)
        self.watcher.client_gone(client)
        self._settle(engine, f"{client.name}: {reason}")

    def told_by_home(self, engine_id: str, generation: str, reason: str = "") -> None:
        """What the home of an engine says: its generation, or none with the reason, as far as that is known."""
        engine = self.engines.get(engine_id)
        if engine is None or engine.elsewhere is None or not engine.workers:
            return
        if (engine.told, engine.reason) != (generation, reason):
            engine.told = generation
            self._settle(engine, reason)

    def forget(self, before: float) -> None:
        """Drop what has been gone since before Unix time ``before``, and what is gone beyond the bounds."""
        self.roster.forget(before)
        for engine_id in self._gone.forgotten(before):
            self._forget(self.engines[engine_id])

    def by_route(self, route: bytes) -> Client | None:
        """The living client behind a route, None where there is none."""
        client = self.behind(route)
        return client if client is not None and client.state != "gone" else None

    def behind(self, route: bytes) -> Client | None:
        """The client that registered on a route, also one that is gone: what it sent may be taken after its end."""
        return self.roster.on_route(route)

    def ready(self, engine_id: str) -> LocalEngine | None:
        """The engine, if all its workers are known here: of one whose home is elsewhere they never are."""
        engine = self.engines.get(engine_id)
        there = engine is not None and engine.state == "ready" and engine.elsewhere is None
        return engine if there else None

    def at(self, engine_id: str, generation: str) -> LocalEngine:
        """The engine, if all its workers are here and it is at that generation. Raises `RequestRefused`."""
        engine = self.ready(engine_id)
        if engine is None:
            raise self.not_ready(engine_id)
        if generation != engine.generation:
            raise RequestRefused(
                "KVD-PEER-GENERATION",
                f"engine {engine_id!r} is generation {engine.generation}, asked for was {generation}",
                hint="it restarted: blocks of an earlier generation are gone",
                final=True,
            )
        return engine

    def not_ready(self, engine_id: str) -> RequestRefused:
        """Why an engine cannot be used: unknown, gone, or workers of it are missing."""
        engine = self.engines.get(engine_id)
        if engine is None:
            known = few(heapq.nsmallest(MAX_NAMES, self.engines), count=len(self.engines))
            return RequestRefused(
                "KVD-ENGINE-UNKNOWN",
                f"no engine {engine_id!r} is registered here; known: {known}",
                hint="check the engine_id, and that its workers use this kvd (`kvctl workers`)",
            )
        if engine.state == "gone":
            return RequestRefused(
                "KVD-ENGINE-GONE", f"engine {engine_id!r} is gone: {engine.reason}", hint="start it again"
            )
        here = few(map(str, engine.ranks), count=len(engine.ranks))
        if engine.elsewhere is not None:
            return RequestRefused(
                "KVD-ENGINE-PARTIAL",
                f"engine {engine_id!r} is on several hosts, and {len(engine.workers)} of its"
                f" {engine.facts.world_size} workers are at this kvd: {here}",
                hint=f"ask the kvd of its scheduler, which is at {engine.home}",
            )
        return RequestRefused(
            "KVD-ENGINE-PARTIAL",
            f"engine {engine_id!r} has {len(engine.workers)} of {engine.facts.world_size} workers; here: {here}"
            + (f" ({engine.reason})" if engine.reason else ""),
            hint="see the log of the missing ranks; `kvctl workers` lists those that came",
        )

    async def wait_up(self, engine_id: str, seconds: float) -> LocalEngine:
        """As `wait_ready`; an engine whose scheduler alone is missing is waited for, and given without in the end."""
        until, settling = time.monotonic() + min(seconds, SCHEDULER_SECONDS), self.settling
        engine = await self._wait_ready(engine_id, seconds, settling=settling)
        while not engine.up and engine.state != "gone" and (left := until - time.monotonic()) > 0:
            await engine.woken(left)
        return await self._wait_ready(engine_id, seconds, settling=settling)

    async def wait_ready(self, engine_id: str, seconds: float) -> LocalEngine:
        """The engine, waiting ``seconds`` for its missing workers; for an unknown one where kvd is ``settling`` now.

        Raises `RequestRefused` naming what is missing.
        """
        return await self._wait_ready(engine_id, seconds, settling=self.settling)

    async def _wait_ready(self, engine_id: str, seconds: float, *, settling: bool) -> LocalEngine:
        deadline = time.monotonic() + seconds
        while (ready := self.ready(engine_id)) is None:
            engine = self.engines.get(engine_id)
            left = deadline - time.monotonic()
            if engine is not None and engine.elsewhere is not None:
                raise self.not_ready(engine_id)
            if left <= 0 or not (settling or (engine is not None and engine.state == "partial")):
                raise self.not_ready(engine_id)
            if engine is None:
                await asyncio.sleep(min(0.05, left))  # only in the first seconds of a kvd
                continue
            await engine.woken(left)
        return ready

    def ended(self, engine_id: str, generation: str) -> bool:
        """Whether that generation is over. While kvd is ``settling`` an engine that is not back yet does not count."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            if engine.generation == generation:
                return False
            if engine.generation or generation in engine.ended:
                return True
        return not self.settling

    def _place(self, client: Client, *, back: bool) -> tuple[LocalEngine, Client | None]:
        """The engine of a client, and who has its place there, for a client that may have it."""
        engine, holder = self.engines.get(client.engine.engine_id), None
        if engine is not None and engine.alive:
            refuse_stranger(engine, client)
            holder = engine.holder(client.rank)
            refuse_conflict(engine, holder, client)
        if not back and holder is None:
            self.roster.check_room(client)
        return self._engine(engine, client), holder

    def _engine(self, engine: LocalEngine | None, client: Client) -> LocalEngine:
        """A new one where there is none, or where all that is left of it is another user's past."""
        if engine is not None and (engine.alive or engine.uid == client.uid):
            if engine.state == "gone":
                self._check_room(client)
            return engine
        self._check_room(client)
        made = LocalEngine(client.engine, client.uid)
        if engine is not None:
            self._gone.discard(client.engine.engine_id)
            self._forget(engine)
            made.ended = engine.ended
        self.engines[client.engine.engine_id] = made
        self._count(made, 1)
        return made

    def _check_room(self, client: Client) -> None:
        if full := beyond(self._living_of, "engines", client.uid, 1, (MOST_ENGINES_OF_UID, MOST_ENGINES)):
            raise RequestRefused(
                "KVD-TOO-MANY",
                f"engine {client.engine.engine_id!r} is not taken: {full}",
                hint="stop some; `kvctl engines` lists them",
            )

    def _count(self, engine: LocalEngine, number: int) -> None:
        self.counts.add(f"engines.{engine.state}", number)
        if engine.state != "gone":
            self._living_of.add(engine.uid, number)

    def _forget(self, engine: LocalEngine) -> None:
        self._count(engine, -1)
        del self.engines[engine.facts.engine_id]
        engine.wake()  # who waits for it looks again, and finds another one or none
        self.watcher.engine_forgotten(engine)

    def _settle(self, engine: LocalEngine, reason: str) -> None:
        engine_id = engine.facts.engine_id
        complete = engine.complete
        made = generation_of(engine.incarnations) if complete else ""
        generation = made if engine.elsewhere is None else engine.told
        before, engine.generation = engine.generation, generation
        if generation != before:
            engine.shape = engine.find_shape() if generation else ""
            engine.compatibility_class = engine.find_class() if generation else ""
        state: EngineState = "ready" if complete else "partial" if engine.alive else "gone"
        if state != engine.state:
            self._count(engine, -1)
            engine.state, engine.since = state, time.time()
            self._count(engine, 1)
            if state == "gone":
                self._gone.add(engine_id, engine.uid)
                if facts_bytes(engine.facts) > LARGE_BYTES:
                    engine.facts = briefly(engine.facts)
            else:
                self._gone.discard(engine_id)
        engine.reason = reason
        if before and before != generation:
            engine.ended = (*engine.ended, before)[-ENDED_KEPT:]
            self._events.emit("engine.gone", engine_id, generation=before, reason=reason)
            self.watcher.engine_ended(engine, before, reason)
        if generation and before != generation:
            self._events.emit("engine.ready", engine_id, generation=generation, workers=len(engine.workers))
            self.watcher.engine_ready(engine)
            engine.wake()
