"""Handshakes: what local engines know of peers, fetched once, compared once, taken back when a generation ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvd.geometry.errors import GeometryError
from kvd.service.config import LivenessSettings, PeerSettings
from kvd.service.errors import PeerAway, Refusal
from kvd.service.events import Events
from kvd.service.peers import Links
from kvd.service.registry import Engine, Registry
from kvd.wire.frame import Message, kind_of
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, PeerGone, PeerReady
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.reply import Factor, Refused

Compare = Callable[[EngineCard, EngineCard], tuple[Factor, ...]]
Push = Callable[[bytes, Message], None]
Key = tuple[Endpoint, str]
"""Where a peer engine is and its id; ``Endpoint()`` for one at this kvd."""
HERE = Endpoint()


@dataclass(frozen=True, slots=True)
class Myself:
    """This kvd as it presents itself; ``started`` is time.monotonic(), ``endpoint`` has port 0 without peer socket."""

    kvd_id: str
    generation: str
    host: str
    endpoint: Endpoint
    started: float
    started_at: float


@dataclass(slots=True)
class PeerEngine:
    """A peer engine as fetched. ``users``: local engines that were given it, with their generation then."""

    card: EngineCard
    state: Literal["ready", "unreachable", "gone"] = "ready"
    reason: str = ""
    since: float = field(default_factory=time.time)
    users: dict[str, str] = field(default_factory=dict)


class Handshakes:
    """All peer engines that local ones use or used."""

    def __init__(
        self,
        myself: Myself,
        registry: Registry,
        links: Links,
        events: Events,
        push: Push,
        compare: Compare,
        peer: PeerSettings,
        liveness: LivenessSettings,
    ) -> None:
        self.peers: dict[Key, PeerEngine] = {}
        self.liveness = liveness
        self._peer = peer
        self._myself = myself
        self._registry = registry
        self._links = links
        self._events = events
        self._push = push
        self._compare = compare
        self._flights: dict[tuple[Key, str], asyncio.Task[EngineCard]] = {}
        self._verdicts: dict[tuple[str, str], tuple[Factor, ...]] = {}

    @property
    def settling(self) -> bool:
        """Whether this kvd is so young that its workers may not all be back."""
        return time.monotonic() - self._myself.started < self.liveness.settle_seconds

    async def get(self, ask: GetPeer, asker: bytes = b"") -> PeerReady:
        """The peer engine that a local engine asks for; the engine's other clients are told of it too.

        Raises `Refusal`: unknown or incomplete engines, a peer that is away, another generation, incompatibility.
        """
        began = time.monotonic()
        engine = await self._registry.wait_ready(
            ask.local_engine, self._peer.handshake_seconds, settling=self.settling
        )
        key = self._key(ask)
        peer, cached = await (self._here(ask, key) if key[0] == HERE else self._there(ask, key))
        if ask.generation and peer.card.generation != ask.generation:
            raise Refusal(
                "KVD-PEER-GENERATION",
                f"engine {ask.engine_id!r} is at generation {peer.card.generation}, asked for is {ask.generation}",
                hint="it restarted since the request was prefilled: its old blocks are gone, recompute",
            )
        await self._refuse_incompatible(engine, peer.card)
        seconds = 0.0 if cached else time.monotonic() - began
        ready = PeerReady(
            local_engine=ask.local_engine, peer=peer.card, endpoint=key[0], seconds=seconds, cached=cached
        )
        if peer.users.get(ask.local_engine) != engine.generation and engine.state == "ready":
            peer.users[ask.local_engine] = engine.generation
            self._events.emit(
                "handshake.done",
                ask.engine_id,
                local=ask.local_engine,
                generation=peer.card.generation,
                seconds=seconds,
            )
            for client in engine.clients:
                if client.route != asker:
                    self._push(client.route, ready)
        return ready

    def using(self, endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
        """The engines (id, generation) behind an endpoint that local ones use."""
        return tuple(
            (engine_id, peer.card.generation)
            for (where, engine_id), peer in self.peers.items()
            if where == endpoint and peer.state != "gone"
        )

    def link_up(self, endpoint: Endpoint) -> None:
        """The peer kvd is back: what is known of its engines holds until it says otherwise."""
        self._mark(endpoint, "ready", "")

    def link_down(self, endpoint: Endpoint, reason: str) -> None:
        """The peer kvd is away. Its engines may well live: what is known stays in use."""
        self._mark(endpoint, "unreachable", reason)

    def peer_engine_gone(self, endpoint: Endpoint, engine_id: str, generation: str, reason: str) -> None:
        """A generation of a peer engine ended: take it back from all that were given it."""
        peer = self.peers.get((endpoint, engine_id))
        if peer is None or peer.state == "gone" or peer.card.generation != generation:
            return
        peer.state, peer.reason, peer.since = "gone", reason, time.time()
        self._verdicts = {pair: bad for pair, bad in self._verdicts.items() if pair[1] != generation}
        self._events.emit("engine.lost", engine_id, generation=generation, reason=reason)
        gone = PeerGone(engine_id=engine_id, generation=generation, reason=reason)
        for local_engine in peer.users:
            if engine := self._registry.engines.get(local_engine):
                for client in engine.clients:
                    self._push(client.route, gone)

    def local_engine_ended(self, engine: Engine, generation: str, reason: str) -> None:
        """A local engine's generation ended: it uses nothing any more, and nobody here may use it."""
        engine_id = engine.facts.engine_id
        for peer in self.peers.values():
            peer.users.pop(engine_id, None)
        self._verdicts = {pair: bad for pair, bad in self._verdicts.items() if pair[0] != generation}
        self.peer_engine_gone(HERE, engine_id, generation, reason)

    def forget(self, before: float) -> None:
        """Drop peer engines that have been gone since before Unix time ``before``."""
        for key, peer in list(self.peers.items()):
            if peer.state == "gone" and peer.since < before:
                del self.peers[key]

    def _key(self, ask: GetPeer) -> Key:
        given = ask.endpoint
        if given in (HERE, self._myself.endpoint):
            return HERE, ask.engine_id
        local = self._registry.ready(ask.engine_id)
        if local is not None and ask.generation and local.generation == ask.generation:
            return HERE, ask.engine_id
        if not given.host or not 0 < given.port < 65536:
            raise Refusal(
                "KVD-PEER-ADDRESS",
                f"engine {ask.engine_id!r}: {given.host!r} port {given.port} is no address of a peer kvd",
                hint="set peer.listen in the configuration of the kvd beside that engine",
            )
        return given, ask.engine_id

    async def _here(self, ask: GetPeer, key: Key) -> tuple[PeerEngine, bool]:
        engine = await self._registry.wait_ready(
            ask.engine_id, self._peer.handshake_seconds, settling=self.settling
        )
        return self._keep(key, engine.card()), True

    async def _there(self, ask: GetPeer, key: Key) -> tuple[PeerEngine, bool]:
        known = self.peers.get(key)
        if known and known.state != "gone" and ask.generation in ("", known.card.generation):
            return known, True
        flight = self._flights.get((key, ask.generation))
        if flight is None:
            self._events.counters["handshakes.flights"] += 1
            flight = asyncio.get_running_loop().create_task(self._fetch(key))
            self._flights[key, ask.generation] = flight
            flight.add_done_callback(lambda done: self._landed((key, ask.generation), done))
        # Shielded: one caller that is given up must not end the flight of the others.
        card = await asyncio.shield(flight)
        return self._keep(key, card), False

    def _landed(self, flight: tuple[Key, str], done: asyncio.Task[EngineCard]) -> None:
        del self._flights[flight]
        if not done.cancelled():
            done.exception()  # looked at here, since everyone who waited may have left

    async def _fetch(self, key: Key) -> EngineCard:
        endpoint, engine_id = key
        question = DescribeEngine(
            engine_id=engine_id, kvd_id=self._myself.kvd_id, kvd_generation=self._myself.generation
        )
        try:
            answer = await self._links.get(endpoint).ask(question, self._peer.handshake_seconds)
        except PeerAway as away:
            self._events.emit("handshake.failed", engine_id, reason=away.message)
            raise Refusal(
                "KVD-PEER-UNREACHABLE",
                f"engine {engine_id!r}: {away.message}",
                hint="check that kvd runs there, its peer.listen and peer.advertise, and the firewall between",
            ) from None
        if isinstance(answer, EngineDescribed):
            return answer.card
        self._events.emit("handshake.failed", engine_id, reason=getattr(answer, "message", kind_of(answer)))
        if isinstance(answer, Refused):
            raise Refusal(
                answer.code, f"the kvd at {endpoint.host}:{endpoint.port}: {answer.message}", hint=answer.hint
            )
        raise Refusal(
            "KVD-PEER-PROTOCOL", f"the kvd at {endpoint.host}:{endpoint.port} answered {kind_of(answer)}"
        )

    def _keep(self, key: Key, card: EngineCard) -> PeerEngine:
        known = self.peers.get(key)
        if known is not None and known.state != "gone":
            if known.card.generation == card.generation:
                return known
            self.peer_engine_gone(
                *key, known.card.generation, f"it restarted as generation {card.generation}"
            )
        self.peers[key] = PeerEngine(card)
        return self.peers[key]

    async def _refuse_incompatible(self, engine: Engine, peer: EngineCard) -> None:
        pair = (engine.generation, peer.generation)
        if pair not in self._verdicts:
            # Planning a large pair takes tens of milliseconds, which heartbeats must not wait for.
            factors = await asyncio.to_thread(self._compare, engine.card(), peer)
            self._verdicts[pair] = tuple(f for f in factors if not f.ok)
            if bad := self._verdicts[pair]:
                self._events.emit(
                    "handshake.refused", peer.engine.engine_id, local=engine.facts.engine_id,
                    factors=", ".join(f"{f.name}: {f.local} / {f.remote}" for f in bad),
                )  # fmt: skip
        if bad := self._verdicts[pair]:
            named = "; ".join(f"{f.name} is {f.local} here and {f.remote} there" for f in bad)
            raise Refusal(
                "KVD-INCOMPATIBLE",
                f"{engine.facts.engine_id} cannot read from {peer.engine.engine_id}: {named}",
                hint="`kvctl describe-topology` compares the two engines factor by factor",
                factors=bad,
            )

    def _mark(self, endpoint: Endpoint, state: Literal["ready", "unreachable"], reason: str) -> None:
        for (where, _), peer in self.peers.items():
            if where == endpoint and peer.state not in ("gone", state):
                peer.state, peer.reason, peer.since = state, reason, time.time()


def compare_cards(local: EngineCard, peer: EngineCard) -> tuple[Factor, ...]:
    """Factor by factor, whether ``local`` can read from ``peer``; a card that cannot be read is a factor that fails."""
    # numpy comes with them: kvd serves first and imports them then (`serve`), off the loop.
    from kvd.client.cards import engine_geometry
    from kvd.topology import compat

    try:
        factors = compat.compare(engine_geometry(local), engine_geometry(peer))
    except GeometryError as error:
        return (Factor("geometry", "readable", f"not readable: {error}", ok=False),)
    return tuple(Factor(f.name, f.local, f.remote, f.ok, f.note) for f in factors)
