"""The registry: which workers and schedulers are here, which engines they make up, and when one began or ended."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from kvd.service.engines.contradictions import contradiction
from kvd.service.engines.local_engine import Client, EngineState, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.service.sockets.events import Events
from kvd.wire.names import generation_of

SCHEDULER_SECONDS = 2.0
"""How long the scheduler of an engine with all its workers is waited for: after a restart of kvd it is near."""


class Watcher(Protocol):
    """Who has to be told of changes; called on the loop, must not wait."""

    def engine_ready(self, engine: LocalEngine) -> None:
        """All workers are here."""

    def engine_up(self, engine: LocalEngine) -> None:
        """All workers and the scheduler are here."""

    def engine_ended(self, engine: LocalEngine, generation: str, reason: str) -> None:
        """That generation will not come back."""

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

    def client_gone(self, client: Client) -> None:
        """Nothing."""


class Registry:
    """All clients and engines of this host, by incarnation and by engine id.

    ``watcher`` is told of changes. ``settled`` is the time.monotonic() until which workers may not all be back.
    """

    def __init__(self, events: Events, settled: float) -> None:
        self.watcher: Watcher = Unwatched()
        self.settled = settled
        self.clients: dict[str, Client] = {}
        self.engines: dict[str, LocalEngine] = {}
        self._routes: dict[bytes, Client] = {}
        self._events = events

    @property
    def settling(self) -> bool:
        """Whether this kvd is so young that its workers may not all be back."""
        return time.monotonic() < self.settled

    def register(self, client: Client) -> LocalEngine:
        """Take a client, new or known. Raises `RequestRefused` where it contradicts one that lives."""
        engine = self.engines.get(client.engine.engine_id)
        known = self.clients.get(client.incarnation)
        if engine is not None:
            _refuse_conflict(engine, client)
            holder = _holder(engine, client)
            if holder is not None and holder.incarnation != client.incarnation:
                self.end(holder, f"replaced by incarnation {client.incarnation} of process {client.pid}")
            if not any(engine.clients):
                engine.facts = client.engine
        else:
            engine = self.engines[client.engine.engine_id] = LocalEngine(client.engine)
        if known is not None and known.state != "gone":
            client.registered = known.registered
        self.clients[client.incarnation] = client
        self._routes[client.route] = client
        if client.rank is None:
            engine.scheduler = client
        else:
            engine.workers[client.rank] = client
        if known is None or known.state == "gone":
            self._events.emit(
                f"{client.kind}.registered", client.name, incarnation=client.incarnation, pid=client.pid
            )
        self._settle(engine, "")
        if engine.up:
            engine.wake()
        if engine.up and (known is None or known.state == "gone"):
            self.watcher.engine_up(engine)
        return engine

    def heard(self, incarnation: str, route: bytes) -> Client | None:
        """A sign of life. None where the incarnation is not known (any more), or not on this connection.

        What was sent on the other connection may be lost with it: the client is to register here and say what it holds.
        """
        client = self.clients.get(incarnation)
        if client is None or client.state == "gone" or client.route != route:
            return None
        client.heard = time.monotonic()
        if client.state == "silent":
            client.state, client.reason, client.since = "alive", "", time.time()
            self._events.emit(f"{client.kind}.alive", client.name, incarnation=incarnation)
        return client

    def silence(self, client: Client, reason: str) -> None:
        """Mark a living client as silent."""
        if client.state == "alive":
            client.state, client.reason, client.since = "silent", reason, time.time()
            self._events.emit(f"{client.kind}.silent", client.name, reason=reason, pid=client.pid)

    def end(self, client: Client, reason: str, *, ended: bool = False) -> None:
        """A client is no more, where it has ``ended`` for certain. Its engine's generation ends with any worker."""
        if client.state == "gone":
            return
        client.state, client.reason, client.since = "gone", reason, time.time()
        client.ended = ended
        # It is remembered for operators, who look at no geometry.
        client.geometry = None
        if client.card is not None:
            client.card = msgspec.structs.replace(client.card, geometry=b"", metadata=b"")
        engine = self.engines[client.engine.engine_id]
        if client.rank is None:
            engine.scheduler = None
        else:
            engine.workers.pop(client.rank, None)
        self._events.emit(f"{client.kind}.gone", client.name, reason=reason, pid=client.pid)
        self.watcher.client_gone(client)
        self._settle(engine, f"{client.name}: {reason}")

    def forget(self, before: float) -> None:
        """Drop what has been gone since before Unix time ``before``."""
        for incarnation, client in list(self.clients.items()):
            if client.state == "gone" and client.since < before:
                del self.clients[incarnation]
        self._routes = {
            r: c for r, c in self._routes.items() if c.route == r and c.incarnation in self.clients
        }
        for engine_id, engine in list(self.engines.items()):
            if engine.state == "gone" and engine.since < before and not engine.waiters:
                del self.engines[engine_id]

    def by_route(self, route: bytes) -> Client | None:
        """The living client behind a route, None where there is none."""
        client = self.behind(route)
        return client if client is not None and client.state != "gone" else None

    def behind(self, route: bytes) -> Client | None:
        """The client that registered on a route, also one that is gone: what it sent may be taken after its end."""
        client = self._routes.get(route)
        return client if client is not None and client.route == route else None

    def ready(self, engine_id: str) -> LocalEngine | None:
        """The engine, if all its workers are here."""
        engine = self.engines.get(engine_id)
        return engine if engine is not None and engine.state == "ready" else None

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
            known = ", ".join(sorted(self.engines)) or "none"
            return RequestRefused(
                "KVD-ENGINE-UNKNOWN",
                f"no engine {engine_id!r} is registered here; known: {known}",
                hint="check the engine_id, and that its workers use this kvd (`kvctl workers`)",
            )
        if engine.state == "gone":
            return RequestRefused(
                "KVD-ENGINE-GONE", f"engine {engine_id!r} is gone: {engine.reason}", hint="start it again"
            )
        here = ", ".join(str(rank) for rank in sorted(engine.workers)) or "none"
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

    def _settle(self, engine: LocalEngine, reason: str) -> None:
        complete = len(engine.workers) >= engine.facts.world_size
        generation = generation_of(engine.workers[r].incarnation for r in engine.workers) if complete else ""
        before, engine.generation = engine.generation, generation
        if generation != before:
            engine.shape = engine.find_shape() if generation else ""
        state: EngineState = "ready" if complete else "partial" if any(engine.clients) else "gone"
        if state != engine.state:
            engine.state, engine.since = state, time.time()
        engine.reason = reason
        if before and before != generation:
            engine.ended.append(before)
            self._events.emit("engine.gone", engine.facts.engine_id, generation=before, reason=reason)
            self.watcher.engine_ended(engine, before, reason)
        if generation and before != generation:
            self._events.emit(
                "engine.ready", engine.facts.engine_id, generation=generation, workers=len(engine.workers)
            )
            self.watcher.engine_ready(engine)
            engine.wake()


def _holder(engine: LocalEngine, client: Client) -> Client | None:
    return engine.scheduler if client.rank is None else engine.workers.get(client.rank)


def _refuse_conflict(engine: LocalEngine, client: Client) -> None:
    holder = _holder(engine, client)
    if (
        holder
        and holder.state == "alive"
        and holder.incarnation != client.incarnation
        and holder.pid != client.pid
    ):
        raise RequestRefused(
            "KVD-RANK-TAKEN",
            f"{client.name} of process {client.pid} (incarnation {client.incarnation}): that place is held by process"
            f" {holder.pid} (incarnation {holder.incarnation}), which is alive",
            hint="give each engine its own engine_id, or stop the other process; `kvctl workers` lists both",
        )
    others = [c for c in engine.clients if c is not holder]
    if others and (found := contradiction(engine.facts, client.engine)) is not None:
        name, here, there = found
        raise RequestRefused(
            "KVD-ENGINE-CONFLICT",
            f"{client.name} says {name} is {there!r}, but {others[0].name} of the same engine says {here!r}",
            hint="all workers of one engine_id must come from one engine: give the other one its own id",
        )
