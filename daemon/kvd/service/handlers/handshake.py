"""The handshake: what local engines ask of peers, and other kvds of engines here."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from itertools import islice

from kvd.service.daemon import Daemon
from kvd.service.errors import RequestRefused
from kvd.service.handlers.senders import refuse_other_user
from kvd.service.peers.giving import LARGE_ENGINE
from kvd.service.sockets.router import Caller
from kvd.wire.card_parts import PART_BYTES, card_bytes, part_bytes, part_from, with_workers
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, EnginesChanged, GetPeer, Ping, Pong
from kvd.wire.limits import MOST_FOR_DAEMON

MOST_READY = 1024
"""Most engines that a ping's answer names as ready; nobody uses so many of one host."""


def get_peer(daemon: Daemon, caller: Caller, message: GetPeer) -> Message | Awaitable[Message]:
    """The handshake for an engine of the asker's user; at once where the peer is known. Raises `RequestRefused`."""
    if daemon.draining:
        raise RequestRefused("KVD-DRAINING", "this kvd is stopping", hint="ask again when it is back")
    refuse_other_user(daemon, caller, message.local_engine, "ask for peers of")
    return daemon.handshakes.known(message, caller.route) or _fetched(daemon, caller, message)


async def _fetched(daemon: Daemon, caller: Caller, message: GetPeer) -> Message:
    answer = await daemon.handshakes.get(message, caller.route)
    # It may have been registered while it was waited for.
    refuse_other_user(daemon, caller, message.local_engine, "ask for peers of")
    return answer


async def describe_engine(daemon: Daemon, caller: Caller, message: DescribeEngine) -> EngineDescribed:
    """The card of an engine of ours, for another kvd, which is told when it ends. Raises `RequestRefused`."""
    wait = daemon.registry.wait_up if message.keyed and not message.first else daemon.registry.wait_ready
    engine = await wait(message.engine_id, daemon.config.peer.handshake_seconds / 2)
    if message.first is not None and len(engine.workers) > LARGE_ENGINE and daemon.parts_given is not None:
        await daemon.parts_given.turn(caller.route)
        engine = await wait(message.engine_id, 0.0)
    if message.generation not in ("", engine.generation):
        raise RequestRefused(
            "KVD-PEER-GENERATION",
            f"engine {message.engine_id!r} is at generation {engine.generation}, asked for is {message.generation}",
            hint="it restarted: ask again",
        )
    daemon.subscribers.described(caller.route, message.kvd_id, engine, caller.key)
    card = engine.card()
    limit = daemon.config.peer.max_message_bytes
    if message.first is None:
        part, size = None, card_bytes(card)
    else:
        part = part_from(card, max(0, message.first), min(PART_BYTES, limit // 2))
        size = part_bytes(part)
        card = with_workers(card, ())
    if size > limit:
        whole = "the part of the card" if part else "the card"
        raise RequestRefused(
            "KVD-TOO-LARGE",
            f"{whole} of engine {message.engine_id!r} has {size} bytes; a message has at most {limit}",
            hint="raise peer.max_message_bytes on both kvds"
            if size <= MOST_FOR_DAEMON
            else "give both kvds one version, which sends large cards in parts",
        )
    return EngineDescribed(card=card, kvd_generation=daemon.myself.generation, shape=engine.shape, part=part)


def ping(daemon: Daemon, caller: Caller, message: Ping) -> Pong:
    """Here; which of the engines in use are gone, and which there are."""
    gone = daemon.subscribers.pinged(caller.route, message, daemon.registry, caller.key)
    daemon.links.silences.hear(message.silent)
    ready = tuple(_ready(daemon, message.known))
    known = daemon.drains.of if message.known is None else daemon.drains.of.keys() & set(message.known)
    return Pong(
        kvd_id=daemon.myself.kvd_id,
        kvd_generation=daemon.myself.generation,
        gone=gone,
        ready=ready,
        draining=tuple(islice(known, MOST_READY)),
        changes=daemon.engine_changes,
        up=_up(daemon),
        silent=daemon.links.silences.told(),
    )


def engines_changed(daemon: Daemon) -> EnginesChanged:
    """What other kvds are told when an engine came up here."""
    return EnginesChanged(changes=daemon.engine_changes, up=_up(daemon))


def _up(daemon: Daemon) -> int:
    """Engines that have all their workers: whoever wants to know more asks."""
    return daemon.registry.counts.of.get("engines.ready", 0)


def _ready(daemon: Daemon, known: tuple[str, ...] | None) -> Iterator[tuple[str, str]]:
    """The engines (id, generation) that are up, as far as the other kvd knows their ids."""
    engines = daemon.registry.engines
    wanted = engines.values() if known is None else [engines[name] for name in known if name in engines]
    return islice(((e.facts.engine_id, e.generation) for e in wanted if e.up), MOST_READY)
