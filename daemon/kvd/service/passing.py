"""To another kvd and back: what a local client asks about an engine that lives there."""

from __future__ import annotations

from kvd.service.errors import PeerAway, Refusal
from kvd.service.parts import Parts
from kvd.wire.frame import Message, kind_of
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Refused


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
