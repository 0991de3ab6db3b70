"""To another kvd, or to a local client, and back: what is asked about an engine goes where that engine lives."""

from __future__ import annotations

from typing import TypeVar

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
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
    daemon: Daemon,
    endpoint: Endpoint,
    what: str,
    message: Message,
    kind: type[Answer],
    seconds: float = ANSWER_SECONDS + HOP_SECONDS,
) -> Answer:
    """The answer of the kvd at ``endpoint``, which has to be a ``kind``; ``what`` is asked about it.

    Raises `RequestRefused`, that kvd's own among them.
    """
    try:
        answer = await daemon.links.get(endpoint).ask(message, seconds)
    except PeerAway as away:
        raise RequestRefused(
            "KVD-PEER-UNREACHABLE",
            f"{what}: {away.message}",
            hint="keep it and send it again; `kvctl status` shows the peer",
        ) from None
    if isinstance(answer, kind):
        return answer
    where = f"the kvd at {endpoint}"
    if isinstance(answer, Refused):
        raise RequestRefused.passed_on(answer, where)
    raise RequestRefused(
        "KVD-PEER-PROTOCOL", f"{where} answered {kind_of(answer)}, which is no answer to that"
    )


async def ask_client(
    daemon: Daemon,
    client: Client,
    message: Message,
    kind: type[Answer],
    seconds: float = ANSWER_SECONDS,
    hint: str = "send it again",
) -> Answer:
    """A client's answer, which has to be a ``kind``; ``hint`` is what to do where none came.

    Raises `RequestRefused`, the client's own among them.
    """
    if client.state == "silent":  # its answer would come from the thread whose heartbeats are missing
        raise RequestRefused("KVD-WORKER-AWAY", f"{client.name} is silent: {client.reason}", hint=hint)
    try:
        answer = await daemon.parts.ask(client, message, seconds)
    except TimeoutError:
        away = f"{client.name} did not answer a {kind_of(message)} within {seconds:g} s"
        raise RequestRefused("KVD-WORKER-AWAY", away, hint=hint) from None
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Refused):
        # Of an engine's workers any may have refused; its scheduler is one.
        raise RequestRefused.passed_on(answer, client.name if client.kind == "worker" else "")
    raise RequestRefused(
        "KVD-CLIENT-PROTOCOL",
        f"{client.name} answered a {kind_of(message)} with {kind_of(answer)}",
        final=True,
    )


def tell_workers(daemon: Daemon, engine_id: str, message: Message) -> None:
    """Tell the workers of a local engine, without waiting. One at another kvd is not told: it hears with a step."""
    engine = daemon.registry.engines.get(engine_id)
    for worker in engine.workers.values() if engine is not None else ():
        if worker.at is None:
            daemon.parts.send(worker.route, message)
