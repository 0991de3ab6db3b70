"""Handshakes: what local engines know of peers, fetched once, compared once, taken back when a generation ends."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvd.service.config import PeerSettings
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.engines.registry import Registry
from kvd.service.errors import RequestRefused
from kvd.service.fairness.tally import Tally
from kvd.service.peers.answering import WHOLE_BYTES, Addressee, answer
from kvd.service.peers.compatibility import CompatibilityCache, next_step, unlike
from kvd.service.peers.fetching import Flights
from kvd.service.peers.greetings import Greetings
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.looks import WokenLooks
from kvd.service.peers.one_card import displaced
from kvd.service.peers.peer_engine import PeerEngine, PeerEngineKey, complementary
from kvd.service.peers.peer_store import ENDED_SECONDS, PeerStore
from kvd.service.sockets.events import Events
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, GetPeer, PeerGone, PeerReady
from kvd.wire.identity import HERE, Endpoint, EngineCard

PushTo = Callable[[bytes, Message], None]
MOST_WAITING = 1024
"""Most questions about peers of one client that wait: a scheduler asks once for each engine that requests name."""
MOST_REFUSED = 4096
"""Most pairs of generations of which it is remembered that an event told their refusal."""


@dataclass(frozen=True, slots=True)
class Myself:
    """This kvd as it presents itself; ``started`` is time.monotonic(), ``endpoint`` has port 0 without peer socket."""

    kvd_id: str
    generation: str
    host: str
    endpoint: Endpoint
    started: float
    started_at: float


class Handshakes:
    """All peer engines that local ones use or used."""

    def __init__(
        self,
        myself: Myself,
        registry: Registry,
        links: PeerLinks,
        events: Events,
        push: PushTo,
        compatibility: CompatibilityCache,
        peer: PeerSettings,
    ) -> None:
        self.peers = PeerStore()
        self.trusted = {HERE}  # besides them, whom clients name
        self._peer = peer
        self._myself = myself
        self._registry = registry
        self._events = events
        self._push = push
        self._compatibility = compatibility
        question = DescribeEngine(engine_id="", kvd_id=myself.kvd_id, kvd_generation=myself.generation)
        self._flights = Flights(question, links, events, peer, self._keep)
        self._asking: Tally[tuple[str, str, bytes]] = Tally()
        self._waiting: Tally[bytes] = Tally()
        self._refused: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._handing_out = asyncio.Lock()
        self._greetings = Greetings(self.introduce, events.counters)
        self._telling: set[asyncio.Task[None]] = set()
        self.looks = WokenLooks()

    def known(self, ask: GetPeer, asker: bytes = b"") -> PeerReady | None:
        """What `get` would give where the engine was given that peer before; None where that takes any work."""
        engine = self._registry.ready(ask.local_engine)
        peer = self._current((ask.endpoint, ask.engine_id), ask)
        if engine is None or peer is None or ask.endpoint == HERE:
            return None
        if peer.users.get(ask.local_engine) != engine.generation:
            return None
        return self._answer(peer, ask.endpoint, engine, asker, first=ask.first)

    async def get(self, ask: GetPeer, asker: bytes = b"") -> PeerReady:
        """The peer engine that a local engine asks for; the engine's other clients are told of it too.

        Raises `RequestRefused`: unknown or incomplete engines, a peer that is away, another generation, a bad fit.
        """
        if asker and self._waiting[asker] >= MOST_WAITING:
            raise RequestRefused(
                "KVD-BUSY", f"{MOST_WAITING} questions of yours about peers wait already", hint="try again"
            )
        asked = ask.local_engine, ask.engine_id, asker
        self._asking.add(asked)
        self._waiting.add(asker)
        try:
            engine, key, peer, seconds = await self._introduced(ask)
        finally:
            self._asking.add(asked, -1)
            self._waiting.add(asker, -1)
        return self._answer(peer, key[0], engine, asker, seconds, first=ask.first)

    async def introduce(self, ask: GetPeer) -> None:
        """Tell all clients of a local engine of a peer, though none asks. Raises `RequestRefused` as `get` does."""
        await self._introduced(ask)

    def users(self, endpoint: Endpoint, engine_id: str, generation: str) -> Mapping[str, str]:
        """The local engines that were given that generation of a peer, with theirs then."""
        for where in (endpoint, HERE):
            peer = self.peers.get((where, engine_id))
            if peer is not None and peer.state != "gone" and peer.card.generation == generation:
                return peer.users
        return {}

    async def _introduced(self, ask: GetPeer) -> tuple[LocalEngine, PeerEngineKey, PeerEngine, float]:
        """The local engine, the peer that it was given, and the seconds that this took."""
        began = time.monotonic()
        engine = await self._registry.wait_ready(ask.local_engine, self._peer.handshake_seconds)
        key = self._key(ask)
        peer, cached = await (self._here(ask, key) if key[0] == HERE else self._there(ask, key))
        if ask.generation and peer.card.generation != ask.generation:
            raise RequestRefused(
                "KVD-PEER-GENERATION",
                f"engine {ask.engine_id!r} is at generation {peer.card.generation}, asked for is {ask.generation}",
                hint="it restarted since the request was prefilled: its old blocks are gone, recompute",
            )
        cached &= await self._refuse_incompatible(engine, key[0], peer)
        if not cached:
            async with self._handing_out:
                # All who waited wake at once; an answer each turn leaves room for others.
                await asyncio.sleep(0)
        if peer.state == "gone":
            raise RequestRefused(
                "KVD-ENGINE-GONE",
                f"engine {ask.engine_id!r} generation {peer.card.generation} ended just now: {peer.reason}",
                hint="ask again when it is back",
            )
        seconds = 0.0 if cached else time.monotonic() - began
        if peer.users.get(ask.local_engine) != engine.generation and engine.state == "ready":
            self._introduce(engine, key, peer, seconds)
        return engine, key, peer, seconds

    def _introduce(self, engine: LocalEngine, key: PeerEngineKey, peer: PeerEngine, seconds: float) -> None:
        """All clients of a local engine are to know the peer; those that wait for it get it as their answer."""
        engine_id = engine.facts.engine_id
        peer.users[engine_id] = engine.generation
        peer.friends.add(engine_id)
        self._events.emit(
            "handshake.done", key[1], local=engine_id, generation=peer.card.generation, seconds=seconds
        )
        others = [c for c in engine.clients if not self._asking[engine_id, key[1], c.route]]
        task = asyncio.get_running_loop().create_task(self._tell(engine, others, key, peer, seconds))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(
        self, engine: LocalEngine, clients: list[Client], key: PeerEngineKey, peer: PeerEngine, seconds: float
    ) -> None:
        for client in clients:
            # The rest of a large card is asked for; who knows no parts has to ask for the whole.
            first = 0 if client.parts else None
            told = client.kind == "scheduler" or client.parts or peer.size <= WHOLE_BYTES
            if told and client.state != "gone" and peer.state != "gone":
                self._push(
                    client.route, self._answer(peer, key[0], engine, client.route, seconds, first=first)
                )
                await asyncio.sleep(0)

    def _answer(
        self,
        peer: PeerEngine,
        endpoint: Endpoint,
        engine: LocalEngine,
        route: bytes,
        seconds: float = 0.0,
        *,
        first: int | None = None,
    ) -> PeerReady:
        """What the client of a local engine behind ``route`` is told of a peer. Raises `RequestRefused`."""
        to = Addressee(engine, self._registry.by_route(route), first)
        return answer(peer, endpoint, to, seconds, self._compatibility.exchanges)

    def known_ids(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Ids of all engines behind an endpoint that are known, gone ones too: their next generation is of interest."""
        return tuple(self.peers.at(endpoint))

    async def located(self, engine_id: str, endpoint: Endpoint, generation: str) -> PeerEngine:
        """The peer engine as the kvd at ``endpoint`` described it, fetched from there where it is not known.

        Raises `RequestRefused`: it is not there, or it is of another generation.
        """
        ask = GetPeer(local_engine="", engine_id=engine_id, endpoint=endpoint, generation=generation)
        peer, _ = await self._there(ask, (endpoint, engine_id))
        if peer.card.generation != generation:
            raise RequestRefused(
                "KVD-PEER-GENERATION",
                f"engine {engine_id!r} is at generation {peer.card.generation}, spoken of is {generation}",
                hint="it restarted: what it announced before is over",
            )
        return peer

    def using(self, endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
        """The engines (id, generation) behind an endpoint that local ones use."""
        return tuple(
            (engine_id, peer.card.generation)
            for engine_id, peer in self.peers.at(endpoint).items()
            if peer.state != "gone"
        )

    def link_up(self, endpoint: Endpoint) -> None:
        """The peer kvd is back: what is known of its engines holds until it says otherwise."""
        self._mark(endpoint, "ready", "")
        self.looks.wake(endpoint)

    def link_down(self, endpoint: Endpoint, reason: str) -> None:
        """The peer kvd is away. Its engines may well live: what is known stays in use."""
        self._mark(endpoint, "unreachable", reason)

    def peer_engine_gone(self, endpoint: Endpoint, engine_id: str, generation: str, reason: str) -> None:
        """A generation of a peer engine ended: take it back from all that were given it."""
        peer = self.peers.get((endpoint, engine_id))
        if peer is None or peer.state == "gone" or peer.card.generation != generation:
            return
        self.peers.end((endpoint, engine_id), reason)
        self._forget_refusals(1, generation)
        self._events.emit("engine.lost", engine_id, generation=generation, reason=reason)
        gone = PeerGone(engine_id=engine_id, generation=generation, reason=reason)
        for local_engine in peer.users:
            if engine := self._registry.engines.get(local_engine):
                for client in engine.clients:
                    self._push(client.route, gone)

    def peer_engines_ready(self, endpoint: Endpoint, ready: tuple[tuple[str, str], ...]) -> None:
        """A peer kvd has these generations: what local engines used an earlier one of, they are given unasked."""
        for engine_id, generation in ready:
            peer = self.peers.get((endpoint, engine_id))
            if peer is not None and (peer.state == "gone" or peer.card.generation != generation):
                self._greet((endpoint, engine_id), peer.friends, generation)

    def engines_changed(self, endpoint: Endpoint) -> None:
        """Engines of a peer kvd came up or ended."""
        self.looks.wake(endpoint)

    def peer_engines_draining(self, endpoint: Endpoint, draining: tuple[str, ...]) -> None:
        """Of a peer kvd's engines these are to be given nothing new."""
        for peer in self.peers.at(endpoint).values():
            peer.draining = peer.card.engine.engine_id in draining

    def local_engine_up(self, engine: LocalEngine) -> None:
        """A local engine is there: it is given the peers that it knew in an earlier generation, and its neighbours.

        Neighbours are the engines of this kvd that KV can move to or from; they are given it too. None of this while
        either still warms up: to connect takes calls that break what a worker captures as a CUDA graph, and what stands
        in a null block is settled only afterwards.
        """
        engine_id = engine.facts.engine_id
        self.looks.wake_all()
        for key, peer in self.peers.items():
            if peer.state == "ready" and engine_id in peer.friends and key[0] != HERE:
                self._greet(key, {engine_id}, peer.card.generation)
        for other in self._registry.engines.values():
            if other is not engine and other.up and complementary(engine.facts.role, other.facts.role):
                self._greet((HERE, other.facts.engine_id), {engine_id}, other.generation)
                self._greet((HERE, engine_id), {other.facts.engine_id}, engine.generation)

    def local_engine_ended(self, engine: LocalEngine, generation: str, reason: str) -> None:
        """A local engine's generation ended: it uses nothing any more, and nobody here may use it."""
        engine_id = engine.facts.engine_id
        for peer in self.peers.values():
            peer.users.pop(engine_id, None)
        self._forget_refusals(0, generation)
        self.peer_engine_gone(HERE, engine_id, generation, reason)

    def forget(self, before: float) -> None:
        """Drop peer engines that have been gone, or their kvd away, since before Unix time ``before``.

        Who reads from one whose kvd is away goes on: it may live. Its kvd is pinged no more, unless it is asked again.
        """
        self.peers.shed(time.time() - ENDED_SECONDS)
        for key, peer in list(self.peers.items()):
            if peer.state != "ready" and peer.since < before:
                self.peers.drop(key)

    def _key(self, ask: GetPeer) -> PeerEngineKey:
        given = ask.endpoint
        if given in (HERE, self._myself.endpoint):
            return HERE, ask.engine_id
        local = self._registry.ready(ask.engine_id)
        if local is not None and ask.generation and local.generation == ask.generation:
            return HERE, ask.engine_id
        if not given.host or not 0 < given.port < 65536:
            raise RequestRefused(
                "KVD-PEER-ADDRESS",
                f"engine {ask.engine_id!r}: {given.host!r} port {given.port} is no address of a peer kvd",
                hint="set peer.listen in the configuration of the kvd beside that engine",
            )
        return given, ask.engine_id

    def _greet(self, key: PeerEngineKey, local_engines: set[str], generation: str) -> None:
        """Hand a peer engine to local engines ahead of their first request to it."""
        for local in local_engines:
            if (engine := self._registry.ready(local)) is None or not engine.up:
                continue  # given it when it is there
            ask = GetPeer(local_engine=local, engine_id=key[1], endpoint=key[0], generation=generation)
            self._greetings.greet(ask)

    async def _here(self, ask: GetPeer, key: PeerEngineKey) -> tuple[PeerEngine, bool]:
        wait = self._registry.wait_up if ask.keyed else self._registry.wait_ready
        engine = await wait(ask.engine_id, self._peer.handshake_seconds)
        known = self.peers.get(key)
        if known is None or known.state == "gone" or known.card.generation != engine.generation:
            return self._keep(key, engine.card(), engine.uid), True
        if engine.scheduler is not None:
            known.learn_key(engine.scheduler.digest_key)
        return known, True

    def _current(self, key: PeerEngineKey, ask: GetPeer) -> PeerEngine | None:
        """The peer as it is known, where that is good enough."""
        peer = self.peers.get(key)
        if peer is None or peer.state == "gone" or ask.generation not in ("", peer.card.generation):
            return None
        return peer if peer.card.digest_key or not ask.keyed else None

    async def _there(self, ask: GetPeer, key: PeerEngineKey) -> tuple[PeerEngine, bool]:
        if known := self._current(key, ask):
            return known, True
        return await self._flights.fetch(key, ask.generation, keyed=ask.keyed), False

    def _keep(self, key: PeerEngineKey, card: EngineCard, uid: int | None = None) -> PeerEngine:
        known = self.peers.get(key)
        same = known is not None and known.state != "gone" and known.card.generation == card.generation
        live = [
            (where, peer.card, peer.state == "ready")
            for where, peer in self.peers.named(key[1]).items()
            if peer.state != "gone"
        ]
        fetched = PeerEngine(card, uid=uid)
        # Whatever refuses it does so before anything is taken back for its sake.
        others = list(displaced(key[0], card, live, self.trusted))
        leaving = [] if same or key[0] == HERE else self.peers.room_for(key, fetched.size)
        for where, old in others:
            self.peer_engine_gone(where, key[1], old.generation, "another kvd, which is configured, has it")
        if known is not None and same:
            known.learn_key(card.digest_key)
            return known
        if known is not None:
            self.peer_engine_gone(
                *key, known.card.generation, f"it restarted as generation {card.generation}"
            )
            fetched.friends |= known.friends
        for at in leaving:
            self.peers.drop(at)
        self.peers.put(key, fetched)
        return fetched

    async def _refuse_incompatible(self, engine: LocalEngine, where: Endpoint, peer: PeerEngine) -> bool:
        """Raise `RequestRefused` where the two do not fit; else whether that was known."""
        known, bad = await self._compatibility.find(engine, where, peer)
        if not bad:
            return known
        pair = engine.generation, peer.card.generation
        if pair not in self._refused:
            self._refused[pair] = None
            if len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)
            self._events.emit(
                "handshake.refused", peer.card.engine.engine_id, local=engine.facts.engine_id,
                factors=", ".join(f"{f.name}: {f.local} / {f.remote}" for f in bad),
            )  # fmt: skip
        raise RequestRefused(
            "KVD-INCOMPATIBLE",
            f"{engine.facts.engine_id} cannot read from {peer.card.engine.engine_id}: {unlike(bad)}",
            hint=next_step(bad, engine.facts.engine_id, peer.card.engine.engine_id),
            factors=bad,
        )

    def _forget_refusals(self, side: Literal[0, 1], generation: str) -> None:
        for pair in [pair for pair in self._refused if pair[side] == generation]:
            del self._refused[pair]

    def _mark(self, endpoint: Endpoint, state: Literal["ready", "unreachable"], reason: str) -> None:
        for peer in self.peers.at(endpoint).values():
            if peer.state not in ("gone", state):
                peer.change(state, reason)
