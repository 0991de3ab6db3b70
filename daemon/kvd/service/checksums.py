"""Checksums of KV: carries a decoding worker's question to a prefilling worker, over this kvd or two."""

from __future__ import annotations

from kvd.service.errors import Refusal
from kvd.service.parts import Parts
from kvd.service.passing import ask_peer, is_ours, passed_on
from kvd.service.registry import not_ready
from kvd.service.router import Caller
from kvd.wire.checksum import GetSums, Sums
from kvd.wire.frame import kind_of
from kvd.wire.names import rank_name
from kvd.wire.reply import Refused

ANSWER_SECONDS = 2.0
"""What a worker may take to answer."""
HOP_SECONDS = 1.0
"""What the way to another kvd and back may take on top."""


async def from_worker(parts: Parts, caller: Caller, message: GetSums) -> Sums:
    """A local worker's question, for a worker of this kvd or of another. Raises `Refusal`."""
    if parts.registry.by_route(caller.route) is None:
        raise Refusal(
            "KVD-NOT-REGISTERED", "the sender is not registered here", hint="register, then send it again"
        )
    if is_ours(parts, message.endpoint):
        return await from_peer(parts, caller, message)
    what = f"checksums of request {message.request_id!r}"
    answer = await ask_peer(parts, message.endpoint, what, message, ANSWER_SECONDS + HOP_SECONDS)
    if not isinstance(answer, Sums):
        raise passed_on(answer, message.endpoint)
    return answer


async def from_peer(parts: Parts, _caller: Caller, message: GetSums) -> Sums:
    """A question for a worker here. Raises `Refusal`."""
    engine = parts.registry.ready(message.engine_id)
    if engine is None:
        known = parts.registry.engines
        raise not_ready(message.engine_id, known.get(message.engine_id), known)
    if message.generation != engine.generation:
        raise Refusal(
            "KVD-PEER-GENERATION",
            f"engine {message.engine_id!r} is generation {engine.generation}, asked for was {message.generation}",
            hint="it restarted: blocks of an earlier generation are gone",
            final=True,
        )
    worker = engine.workers.get(message.rank)
    if worker is None:
        raise Refusal(
            "KVD-RANK-UNKNOWN",
            f"engine {message.engine_id!r} has no worker {rank_name(message.rank)}",
            hint="`kvctl workers` lists them",
            final=True,
        )
    try:
        answer = await parts.local.ask(worker.route, message, ANSWER_SECONDS)
    except TimeoutError:
        raise Refusal(
            "KVD-WORKER-AWAY",
            f"{worker.name} did not answer a {kind_of(message)} within {ANSWER_SECONDS:g} s",
            hint="send it again",
        ) from None
    if isinstance(answer, Sums):
        return answer
    if isinstance(answer, Refused):
        said = f"{worker.name}: {answer.message}"
        raise Refusal(answer.code, said, hint=answer.hint, final=answer.final)
    raise Refusal(
        "KVD-CLIENT-PROTOCOL",
        f"{worker.name} answered a {kind_of(message)} with {kind_of(answer)}",
        final=True,
    )
