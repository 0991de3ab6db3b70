"""Checksums of KV: carries a decoding worker's question to a prefilling worker, over this kvd or two."""

from __future__ import annotations

from kvd.service.daemon import Daemon
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import ask_client, ask_peer, is_ours
from kvd.service.handlers.hosts import knows_engine
from kvd.service.handlers.senders import registered
from kvd.service.sockets.router import Caller
from kvd.wire.checksum import GetSums, Sums


async def from_worker(daemon: Daemon, caller: Caller, message: GetSums) -> Sums:
    """A local worker's question, for a worker of this kvd or of another. Raises `RequestRefused`."""
    registered(daemon, caller)
    if is_ours(daemon, message.endpoint):
        return await _ask_worker(daemon, message)
    what = f"checksums of request {message.request_id!r}"
    return await ask_peer(daemon, message.endpoint, what, message, Sums)


async def from_peer(daemon: Daemon, caller: Caller, message: GetSums) -> Sums:
    """A question of a host that uses the engine, for a worker here. Raises `RequestRefused`."""
    if not knows_engine(daemon, caller, message.engine_id):
        daemon.counters["sums.strangers"] += 1
        raise RequestRefused(
            "KVD-NOT-DESCRIBED",
            f"the asking host uses no engine {message.engine_id!r} of this kvd",
            hint="have its card described first",
        )
    return await _ask_worker(daemon, message)


async def _ask_worker(daemon: Daemon, message: GetSums) -> Sums:
    engine = daemon.registry.at(message.engine_id, message.generation)
    return await ask_client(daemon, engine.worker(message.rank), message, Sums)
