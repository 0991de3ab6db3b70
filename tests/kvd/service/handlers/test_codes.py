"""What a kvd answers where nobody can be asked: each situation, made of the parts that it needs, and its code."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import PeerAway, RequestRefused
from kvd.service.handlers.dispatch import peer_handlers
from kvd.service.handlers.forwarding import ask_client, ask_peer
from kvd.service.handlers.handshake import get_peer
from kvd.service.sockets.router import Caller
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, Ping
from kvd.wire.identity import Endpoint
from kvd.wire.query import GetStatus
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import facts

THERE = Endpoint("there", 1)
OK, PING = Ok(), Ping(kvd_id="k", kvd_generation="g")
WORKER = Client(kind="worker", engine=facts("p"), incarnation="i", pid=1, route=b"r", uid=1, state="alive")


class Answers:
    """Stands for links and for sessions: whoever is asked gives this answer, or raises it."""

    def __init__(self, answer: Message | Exception) -> None:
        self.answer = answer

    def get(self, _endpoint: Endpoint) -> Answers:
        return self

    async def ask(self, *_asked: object) -> Message:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def daemon(answer: Message | Exception = OK, **more: Any) -> Daemon:
    return cast("Daemon", SimpleNamespace(links=Answers(answer), parts=Answers(answer), **more))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (PeerAway("no answer"), "KVD-PEER-UNREACHABLE"),
        (GetStatus(), "KVD-PEER-PROTOCOL"),
        (Refused(code="KVD-ENGINE-GONE", message="it ended"), "KVD-ENGINE-GONE"),
    ],
    ids=["away", "another answer", "its own refusal"],
)
def test_what_another_kvd_does_instead_of_answering(answer: Message | Exception, code: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        asyncio.run(ask_peer(daemon(answer), THERE, "engine p", PING, Ok))
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (TimeoutError(), "KVD-WORKER-AWAY"),
        (GetStatus(), "KVD-CLIENT-PROTOCOL"),
        (Refused(code="KVD-FORCE-BUSY", message="enough"), "KVD-FORCE-BUSY"),
    ],
    ids=["away", "another answer", "its own refusal"],
)
def test_what_a_worker_does_instead_of_answering(answer: Message | Exception, code: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        asyncio.run(ask_client(daemon(answer), WORKER, PING, Ok))
    assert refused.value.code == code


def test_a_host_whose_key_was_revoked_since_it_connected_is_not_served() -> None:
    keys = SimpleNamespace(authorised=frozenset({b"another"}))
    handler = peer_handlers(daemon(keys=keys))[Ping]
    with pytest.raises(RequestRefused) as refused:
        handler(cast("Caller", SimpleNamespace(key=b"revoked")), PING)
    assert (refused.value.code, "'revoked' is not trusted" in refused.value.message) == (
        "KVD-KEY-REVOKED",
        True,
    )


def test_a_kvd_that_is_stopping_introduces_nobody() -> None:
    asked = GetPeer(local_engine="d", engine_id="p", endpoint=THERE)
    with pytest.raises(RequestRefused) as refused:
        get_peer(daemon(draining=True), cast("Caller", SimpleNamespace(uid=1, pid=2)), asked)
    assert (refused.value.code, bool(refused.value.hint)) == ("KVD-DRAINING", True)
