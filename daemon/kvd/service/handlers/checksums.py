"""Checksums of KV: carries a decoding worker's question to a prefilling worker, over this kvd or two."""

from __future__ import annotations

from kvd.service.daemon import Daemon
from kvd.service.engines.registry import not_ready
from kvd.service.errors import RequestRefused
from kvd.service.handlers.senders import registered
from kvd.service.peers.forwarding import ANSWER_SECONDS, HOP_SECONDS, ask_peer, ask_worker, is_ours, passed_on
from kvd.service.sockets.router import Caller
from kvd.wire.checksum import GetSums, Sums


async def from_worker(daemon: Daemon, caller: Caller, message: GetSums) -> Sums:
    """A local worker's question, for a worker of this kvd or of another. Raises `RequestRefused`."""
    registered(daemon, caller)
    if is_ours(daemon, message.endpoint):
        return await from_peer(daemon, caller, message)
    what = f"checksums of request {message.request_id!r}"
    answer = await ask_peer(daemon, message.endpoint, what, message, ANSWER_SECONDS + HOP_SECONDS)
    if not isinstance(answer, Sums):
        raise passed_on(answer, message.endpoint)
    return answer


async def from_peer(daemon: Daemon, _caller: Caller, message: GetSums) -> Sums:
    """A question for a worker here. Raises `RequestRefused`."""
    engine = daemon.registry.ready(message.engine_id)
    if engine is None:
        known = daemon.registry.engines
        raise not_ready(message.engine_id, known.get(message.engine_id), known)
    if message.generation != engine.generation:
        raise RequestRefused(
            "KVD-PEER-GENERATION",
            f"engine {message.engine_id!r} is generation {engine.generation}, asked for was {message.generation}",
            hint="it restarted: blocks of an earlier generation are gone",
            final=True,
        )
    worker = engine.workers.get(message.rank)
    if worker is None:
        raise RequestRefused(
            "KVD-RANK-UNKNOWN",
            f"engine {message.engine_id!r} has no worker {message.rank}",
            hint="`kvctl workers` lists them",
            final=True,
        )
    return await ask_worker(daemon, worker, message, Sums)
