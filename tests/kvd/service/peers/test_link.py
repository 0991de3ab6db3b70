"""A link to another kvd, with a connection that is made as the test wants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kvd.service.config import PeerSettings
from kvd.service.errors import PeerAway
from kvd.service.peers import link
from kvd.service.peers.link import Dial, PeerLink
from kvd.service.peers.troubles import LinkKeys
from kvd.service.sockets.channel import Channel
from kvd.service.sockets.events import Events
from kvd.wire.handshake import Ping
from kvd.wire.identity import Endpoint
from kvd.zmtp.errors import ZmtpError

THERE = Endpoint("there", 1)


class Told:
    """Stands for who is told of what a link sees."""

    def __init__(self) -> None:
        self.down: list[str] = []

    def known_ids(self, _endpoint: Endpoint) -> tuple[str, ...]:
        return ()

    def using(self, _endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
        return ()

    def link_down(self, _endpoint: Endpoint, reason: str) -> None:
        self.down.append(reason)


def linked(dial: Callable[..., Any], talk: Callable[[PeerLink, Counter[str], Told], Awaitable[None]]) -> None:
    counters: Counter[str] = Counter()
    told = Told()

    async def run() -> None:
        made = PeerLink(
            THERE, cast("Dial", dial), PeerSettings(), Events(None, counters), cast("link.Listener", told),
            Ping(kvd_id="here", kvd_generation="g"),
        )  # fmt: skip
        try:
            await talk(made, counters, told)
        finally:
            await made.close()

    asyncio.run(run())


async def never(*_: object) -> Channel:
    await asyncio.Event().wait()
    raise AssertionError


def test_an_error_that_nobody_thought_of_does_not_end_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RECONNECT_SECONDS", (0.0, 0.0))
    dialled = []

    async def dial(*_: object) -> Channel:
        dialled.append(1)
        raise RuntimeError("can't start new thread")

    async def talk(_made: PeerLink, counters: Counter[str], _told: Told) -> None:
        while len(dialled) < 3:  # noqa: ASYNC110 - an attempt announces nothing
            await asyncio.sleep(0)
        assert counters["errors.internal"] >= 2

    linked(dial, talk)


def test_an_ended_link_fails_who_waits_with_the_reason_and_its_close_waits_for_its_tasks() -> None:
    async def talk(made: PeerLink, _counters: Counter[str], told: Told) -> None:
        asking = asyncio.create_task(made.ask(Ping(kvd_id="here", kvd_generation="g"), 10))
        await asyncio.sleep(0)
        tasks = set(made._tasks.running)
        made.kvd_id = "there"
        made.end("its key is not trusted any more")
        await made.close()
        assert all(task.done() for task in tasks)
        assert not made._tasks.running
        with pytest.raises(PeerAway, match="its key is not trusted any more"):
            await asking
        assert (made.state, told.down) == ("down", ["its key is not trusted any more"])

    linked(never, talk)


def test_a_peer_that_alternates_between_two_troubles_is_told_of_once_for_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(made: PeerLink, _counters: Counter[str], _told: Told) -> None:
        made.keys = LinkKeys(b"K" * 40, "'O' here:1")
        for _ in range(50):
            made.ended(cast("Channel", None), "closed")
            made.ended(cast("Channel", None), ZmtpError("not_authorised", "400"))
        assert len([line for line in caplog.messages if line.startswith("the kvd at there:1: ")]) == 2

    linked(never, talk)
