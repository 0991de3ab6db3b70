"""To another kvd, or to a local worker, and back: what is asked about an engine goes where that engine lives."""

from __future__ import annotations

from typing import TypeVar

from kvd.service.engines.registry import Client
from kvd.service.errors import PeerAway, Refusal
from kvd.service.parts import Parts
from kvd.wire.frame import Message, kind_of
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Refused

Answer = TypeVar("Answer", bound=Message)

ANSWER_SECONDS = 2.0
"""What a worker may take to answer."""
HOP_SECONDS = 1.0
"""What the way to another kvd and back may take on top."""


def is_ours(parts: Parts, endpoint: Endpoint) -> bool:
    """Whether an endpoint names this kvd."""
    return endpoint.host == "" or endpoint == parts.myself.endpoint


async def ask_peer(parts: Parts, endpoint: Endpoint, what: str, message: Message, seconds: float) -> Message:
    """The answer of the kvd at ``endpoint``; ``what`` is asked about it, for the refusal where it is away.

    Raises `Refusal`.
    """
    try:
        return await parts.links.get(endpoint).ask(message, seconds)
    except PeerAway as away:
        raise Refusal(
            "KVD-PEER-UNREACHABLE",
            f"{what}: {away.message}",
            hint="keep it and send it again; `kvctl status` shows the peer",
        ) from None


def passed_on(answer: Message, endpoint: Endpoint) -> Refusal:
    """Another kvd's answer, which is not the one that was wanted, as a refusal of ours."""
    where = f"the kvd at {endpoint.host}:{endpoint.port}"
    if isinstance(answer, Refused):
        return Refusal(
            answer.code,
            f"{where}: {answer.message}",
            hint=answer.hint,
            factors=answer.factors,
            final=answer.final,
        )
    return Refusal("KVD-PEER-PROTOCOL", f"{where} answered {kind_of(answer)}, which is no answer to that")


async def ask_worker(parts: Parts, worker: Client, message: Message, kind: type[Answer]) -> Answer:
    """A local worker's answer, which has to be a ``kind``. Raises `Refusal`, the worker's own among them."""
    if worker.state == "silent":  # its answer would come from the thread whose heartbeats are missing
        raise Refusal("KVD-WORKER-AWAY", f"{worker.name} is silent: {worker.reason}", hint="send it again")
    try:
        answer = await parts.local.ask(worker.route, message, ANSWER_SECONDS)
    except TimeoutError:
        raise Refusal(
            "KVD-WORKER-AWAY",
            f"{worker.name} did not answer a {kind_of(message)} within {ANSWER_SECONDS:g} s",
            hint="send it again",
        ) from None
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Refused):
        raise Refusal(
            answer.code,
            f"{worker.name}: {answer.message}",
            hint=answer.hint,
            factors=answer.factors,
            final=answer.final,
        )
    raise Refusal(
        "KVD-CLIENT-PROTOCOL",
        f"{worker.name} answered a {kind_of(message)} with {kind_of(answer)}",
        final=True,
    )
