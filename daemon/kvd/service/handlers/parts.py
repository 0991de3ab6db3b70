"""Engines over several hosts: what the kvds of their workers tell their home, and what both pass on for workers."""

from __future__ import annotations

import time
from collections.abc import Awaitable

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.handlers import checksums, handshake, pushes
from kvd.service.handlers.forwarding import ANSWER_SECONDS, HOP_SECONDS, ask_client
from kvd.service.handlers.hosts import refuse_impostor
from kvd.service.handlers.registration import card_size, take_worker
from kvd.service.handlers.senders import not_registered
from kvd.service.peers.fetching import MOST_HANDSHAKES
from kvd.service.peers.parts import route_of
from kvd.service.sockets.router import Caller, Handled, Handler
from kvd.wire.checksum import GetSums, Sums
from kvd.wire.frame import Message, kind_of
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import HERE, Endpoint
from kvd.wire.part import AskedOfWorker, ForWorker, FromWorker, JoinWorker, PartAlive, PartHeard
from kvd.wire.reply import Ok, Refused

# --- at the home ---


def join_worker(daemon: Daemon, caller: Caller, message: JoinWorker) -> PartHeard:
    """Another host has a worker of an engine here. Raises `RequestRefused`."""
    card, at = message.card, message.endpoint
    engine_id = card.engine.engine_id
    refuse_impostor(daemon, caller, at, f"that a worker of engine {engine_id!r} is there")
    engine = daemon.registry.engines.get(engine_id)
    if engine is None or engine.home != HERE or all(client.at is not None for client in engine.clients):
        here = "is on this host alone" if engine is not None and engine.alive else "has no process here"
        raise RequestRefused(
            "KVD-ENGINE-UNKNOWN",
            f"engine {engine_id!r} {here}, so {engine_id}/{card.rank} at the kvd at {at} is none of its workers",
            hint="start the engine's process on this host; on all hosts it takes the same engine_id and the same home",
        )
    client = Client(
        kind="worker",
        engine=card.engine,
        incarnation=card.incarnation,
        pid=card.pid,
        route=route_of(at, card.incarnation),
        rank=card.rank,
        card=card,
        parts=True,
        uid=engine.uid,
        size=card_size(card),
        home=HERE,
        at=at,
    )
    engine = take_worker(daemon, client, card)
    return PartHeard(engines=((engine_id, engine.generation),) if engine.generation else ())


def part_alive(daemon: Daemon, caller: Caller, message: PartAlive) -> PartHeard:
    """Which workers live at another host, of engines here. Raises `RequestRefused`."""
    refuse_impostor(daemon, caller, message.endpoint, "which workers are there")
    registry = daemon.registry
    for told in message.gone:
        client = registry.clients.get(told.incarnation)
        if client is not None and client.at == message.endpoint:
            registry.end(client, told.reason)
    generations, unknown = dict[str, str](), list[str]()
    for told in message.workers:
        client = registry.clients.get(told.incarnation)
        if client is None or client.at != message.endpoint or client.state == "gone":
            unknown.append(told.incarnation)
            continue
        if told.reason:
            registry.silence(client, told.reason)
            client.last_heard = time.monotonic()  # of it, not from it: its kvd sees the process
        else:
            registry.sign_of_life(client.incarnation, client.route)
        engine = registry.ready(client.engine.engine_id)
        if engine is not None:
            generations[engine.facts.engine_id] = engine.generation
    return PartHeard(engines=tuple(generations.items()), unknown=tuple(unknown))


def from_worker(daemon: Daemon, caller: Caller, message: FromWorker) -> Handled | Awaitable[Handled]:
    """What a worker at another host asks, as if it had asked here. Raises `RequestRefused`."""
    asked = message.message
    refuse_impostor(daemon, caller, message.endpoint, f"what a worker there asks by a {kind_of(asked)}")
    client = daemon.registry.clients.get(message.incarnation)
    if client is None or client.at != message.endpoint or client.state == "gone":
        raise not_registered()
    sender = Caller(client.route, uid=client.uid, key=caller.key)
    if isinstance(asked, GetSums):
        return checksums.from_worker(daemon, sender, asked)
    if not isinstance(asked, GetPeer):
        return pushes.from_worker(daemon, sender, asked)
    if asked.local_engine != client.engine.engine_id:
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{client.name} asks for peers of engine {asked.local_engine!r}",
            hint="each engine asks for itself",
            final=True,
        )
    if asked.first is None:  # a whole card may be more than a message between kvds
        asked = msgspec.structs.replace(asked, first=0)
    return handshake.get_peer(daemon, sender, asked)


# --- at the other hosts ---


def by_home(
    handler: Handler, daemon: Daemon, caller: Caller, message: GetPeer | AskedOfWorker
) -> Handled | Awaitable[Handled]:
    """Handle what a client asks, or have the home of its engine do it where that is another kvd."""
    client = daemon.registry.by_route(caller.route)
    if client is None or client.elsewhere is None:
        return handler(caller, message)
    return _ask_home(daemon, client, client.elsewhere, message)


async def for_worker(daemon: Daemon, caller: Caller, message: ForWorker) -> Message:
    """What a home asks or tells one of its workers here. Raises `RequestRefused`."""
    client, asked = daemon.registry.clients.get(message.incarnation), message.message
    if client is None or client.elsewhere is None or client.state == "gone":
        raise not_registered()
    refuse_impostor(daemon, caller, client.elsewhere, f"a {kind_of(asked)} for {client.name}")
    if isinstance(asked, PeerReady | PeerGone):
        daemon.local.send(client.route, asked)
        return Ok()
    return await ask_client(daemon, client, asked, Sums if isinstance(asked, GetSums) else Ok)


async def _ask_home(
    daemon: Daemon, client: Client, home: Endpoint, message: GetPeer | AskedOfWorker
) -> Message:
    question = FromWorker(endpoint=daemon.myself.endpoint, incarnation=client.incarnation, message=message)
    seconds = ANSWER_SECONDS + 3 * HOP_SECONDS
    if isinstance(message, GetPeer):
        seconds = MOST_HANDSHAKES * daemon.config.peer.handshake_seconds
    where = f"the kvd at {home}, home of engine {client.engine.engine_id!r}"
    try:
        answer = await daemon.links.get(home).ask(question, seconds)
    except PeerAway as away:
        raise RequestRefused(
            "KVD-PEER-UNREACHABLE",
            f"{where}: {away.message}",
            hint="keep it and send it again; `kvctl status` shows the peer",
        ) from None
    if isinstance(answer, Refused):
        raise RequestRefused.passed_on(answer, where)
    if not isinstance(answer, PeerReady | Sums | Ok):
        raise RequestRefused(
            "KVD-PEER-PROTOCOL", f"{where} answered {kind_of(answer)} to a {kind_of(message)}"
        )
    return answer
