"""Carries changes in the registry to whoever has to act on them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.handlers import registration
from kvd.service.handlers.handshake import engines_changed
from kvd.service.slices import spread
from kvd.wire.identity import HERE


@dataclass(frozen=True, slots=True)
class RegistryWiring:
    """Carries changes in the registry to whoever has to act on them."""

    daemon: Daemon

    def engine_ready(self, engine: LocalEngine) -> None:
        """Its clients here learn the generation at once, not with the next heartbeat."""

        def tell(client: Client) -> None:
            self.daemon.local.send(client.route, registration.registered_as(self.daemon, engine))

        spread(tuple(client for client in engine.clients if client.at is None), tell)
        if engine.elsewhere is not None:
            self.daemon.homes.look_up(engine, engine.elsewhere)

    def engine_up(self, engine: LocalEngine) -> None:
        """Engines that it may read from, or be read by, are introduced to it, and it to them."""
        self.daemon.engine_changes += 1
        self.daemon.handshakes.local_engine_up(engine)
        if self.daemon.peer is not None and engine.elsewhere is None:
            self.daemon.subscribers.engines_changed(
                partial(engines_changed, self.daemon), self.daemon.peer.send
            )

    def engine_ended(self, engine: LocalEngine, generation: str, reason: str) -> None:
        """Local users, other kvds, and the engine's own clients are told."""
        self.daemon.engine_changes += 1
        self.daemon.handshakes.local_engine_ended(engine, generation, reason)
        if self.daemon.peer is not None:
            self.daemon.subscribers.engine_ended(
                engine.facts.engine_id, generation, reason, self.daemon.peer.send
            )

    def engine_forgotten(self, engine: LocalEngine) -> None:
        """Its counts would be shown as those of the next engine of that name, which may be another user's."""
        self.daemon.outcomes.forget(engine.facts.engine_id)
        self.daemon.prefix_counts.forget(engine.facts.engine_id)

    def client_gone(self, client: Client) -> None:
        """Its process is not watched any more; leases die with their scheduler, and so do claims on others'."""
        if client.kind == "scheduler":
            self.daemon.hints.drop((HERE, client.engine.engine_id), of=client.incarnation)
        self.daemon.liveness.unwatch(client)
        self.daemon.leases.owner_gone(client)
        self.daemon.drains.client_gone(client)
        self.daemon.readers.client_gone(client)
        self.daemon.homes.client_gone(client)
        if client.home is not None and client.at is None:  # when its own end is over
            asyncio.get_running_loop().call_soon(self.daemon.parts.home_left, client.engine.engine_id)
