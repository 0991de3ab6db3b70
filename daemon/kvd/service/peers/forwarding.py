"""To another kvd, or to a local worker, and back: what is asked about an engine goes where that engine lives."""

from __future__ import annotations

from typing import TypeVar

from kvd.service.daemon import Daemon
from kvd.service.engines.registry import Client
from kvd.service.errors import PeerAway, RequestRefused
from kvd.wire.frame import Message, kind_of
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Refused

Answer = TypeVar("Answer", bound=Message)

ANSWER_SECONDS = 2.0
"""What a worker may take to answer."""
HOP_SECONDS = 1.0
"""What the way to another kvd and back may take on top."""


def is_ours(daemon: Daemon, endpoint: Endpoint) -> bool:
    """Whether an endpoint names this kvd."""
    return endpoint.host == "" or endpoint == daemon.myself.endpoint


async def ask_peer(
    daemon: Daemon, endpoint: Endpoint, what: str, message: Message, seconds: float
) -> Message:
    """The answer of the kvd at ``endpoint``; ``what`` is asked about it, for the refusal where it is away.

    Raises `RequestRefused`.
    """
    try:
        return await daemon.links.get(endpoint).ask(message, seconds)
    except PeerAway as away:
        raise RequestRefused(
            "KVD-PEER-UNREACHABLE",
            f"{what}: {away.message}",
            hint="keep it and send it again; `kvctl status` shows the peer",
        ) from None


def passed_on(answer: Message, endpoint: Endpoint) -> RequestRefused:
    """Another kvd's answer, which is not the one that was wanted, as a refusal of ours."""
    where = f"the kvd at {endpoint.host}:{endpoint.port}"
    if isinstance(answer, Refused):
        return RequestRefused(
            answer.code,
            f"{where}: {answer.message}",
            hint=answer.hint,
            factors=answer.factors,
            final=answer.final,
        )
    return RequestRefused(
        "KVD-PEER-PROTOCOL", f"{where} answered {kind_of(answer)}, which is no answer to that"
    )


async def ask_worker(daemon: Daemon, worker: Client, message: Message, kind: type[Answer]) -> Answer:
    """A local worker's answer, which has to be a ``kind``. Raises `RequestRefused`, the worker's own among them."""
    if worker.state == "silent":  # its answer would come from the thread whose heartbeats are missing
        raise RequestRefused(
            "KVD-WORKER-AWAY", f"{worker.name} is silent: {worker.reason}", hint="send it again"
        )
    try:
        answer = await daemon.local.ask(worker.route, message, ANSWER_SECONDS)
    except TimeoutError:
        raise RequestRefused(
            "KVD-WORKER-AWAY",
            f"{worker.name} did not answer a {kind_of(message)} within {ANSWER_SECONDS:g} s",
            hint="send it again",
        ) from None
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Refused):
        raise RequestRefused(
            answer.code,
            f"{worker.name}: {answer.message}",
            hint=answer.hint,
            factors=answer.factors,
            final=answer.final,
        )
    raise RequestRefused(
        "KVD-CLIENT-PROTOCOL",
        f"{worker.name} answered a {kind_of(message)} with {kind_of(answer)}",
        final=True,
    )
