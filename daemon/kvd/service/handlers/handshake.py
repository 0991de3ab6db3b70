"""The handshake: what local engines ask of peers, and other kvds of engines here."""

from __future__ import annotations

from collections.abc import Awaitable

from kvd.service.daemon import Daemon
from kvd.service.errors import RequestRefused
from kvd.service.sockets.router import Caller
from kvd.wire.frame import Message
from kvd.wire.handshake import DescribeEngine, EngineDescribed, GetPeer, Ping, Pong


def get_peer(daemon: Daemon, caller: Caller, message: GetPeer) -> Message | Awaitable[Message]:
    """The handshake for a local engine; at once where the peer is known. Raises `RequestRefused`."""
    if daemon.draining:
        raise RequestRefused("KVD-DRAINING", "this kvd is stopping", hint="ask again when it is back")
    return daemon.handshakes.known(message, caller.route) or daemon.handshakes.get(message, caller.route)


async def describe_engine(daemon: Daemon, caller: Caller, message: DescribeEngine) -> EngineDescribed:
    """The card of an engine of ours, for another kvd, which is told when it ends. Raises `RequestRefused`."""
    wait = daemon.registry.wait_up if message.keyed else daemon.registry.wait_ready
    engine = await wait(message.engine_id, daemon.config.peer.handshake_seconds / 2)
    daemon.subscribers.described(caller.route, message.kvd_id, engine, caller.key)
    return EngineDescribed(card=engine.card(), kvd_generation=daemon.myself.generation, shape=engine.shape)


def ping(daemon: Daemon, caller: Caller, message: Ping) -> Pong:
    """Here; which of the engines in use are gone, and which there are."""
    gone = daemon.subscribers.pinged(caller.route, message, daemon.registry, caller.key)
    ready = tuple((e.facts.engine_id, e.generation) for e in daemon.registry.engines.values() if e.up)
    return Pong(kvd_id=daemon.myself.kvd_id, kvd_generation=daemon.myself.generation, gone=gone, ready=ready)
