"""A link to another kvd, with a connection that is made as the test wants."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from kvd.service.config import PeerSettings
from kvd.service.errors import PeerAway
from kvd.service.peers import link
from kvd.service.peers.link import Dial, PeerLink
from kvd.service.peers.listener import Listener
from kvd.service.peers.silence import Silences
from kvd.service.peers.troubles import LinkKeys
from kvd.service.sockets.channel import Channel
from kvd.service.sockets.events import Events
from kvd.wire.frame import WIRE_VERSION, decode, encode
from kvd.wire.handshake import Ping, Pong
from kvd.wire.identity import Endpoint
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Received

THERE = Endpoint("there", 1)


class Told:
    """Stands for who is told of what a link sees."""

    def __init__(self) -> None:
        self.down: list[str] = []
        self.used: tuple[tuple[str, str], ...] = ()

    def known_ids(self, _endpoint: Endpoint) -> tuple[str, ...]:
        return ()

    def using(self, _endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
        return self.used

    def link_up(self, _endpoint: Endpoint) -> None:
        """It is told of as the state of the link."""

    def peer_engines_ready(self, _endpoint: Endpoint, _ready: object) -> None:
        """Nobody uses any."""

    def peer_engines_draining(self, _endpoint: Endpoint, _draining: object) -> None:
        """The same."""

    def link_down(self, _endpoint: Endpoint, reason: str) -> None:
        self.down.append(reason)


def linked(dial: Callable[..., Any], talk: Callable[[PeerLink, Counter[str], Told], Awaitable[None]]) -> None:
    counters: Counter[str] = Counter()
    told = Told()

    async def run() -> None:
        made = PeerLink(
            THERE, cast("Dial", dial), PeerSettings(), Events(None, counters), cast("Listener", told),
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


class Answering:
    """A connection whose other end answers each ping at once, unless it is told not to; it counts them."""

    def __init__(self, owner: PeerLink) -> None:
        self.owner, self.pings, self.answers = owner, 0, True
        self.unsent = self.buffers = 0

    def send(self, _before: bytes, frame: bytes) -> None:
        message, correlation = decode(frame)
        assert isinstance(message, Ping)
        self.pings += 1
        if not self.answers:
            return
        answer = encode(Pong(kvd_id="there", kvd_generation="g"), correlation)
        received = Received(answer, 1, len(answer))
        asyncio.get_running_loop().call_soon(self.owner.received, cast("Channel", self), received, None)

    def end(self, _cause: str = "told") -> None:
        """Nothing more comes."""


def answered(
    talk: Callable[[PeerLink, Answering, Told], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Talk about a quiet link that is up, whose peer answers; pings that are due come after 10 ms."""
    monkeypatch.setattr(link, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(link, "QUIET_SECONDS", -1.0)
    told = Told()

    async def run() -> None:
        there: list[Answering] = []

        async def dial(owner: PeerLink, *_: object) -> Channel:
            if there:
                await asyncio.Event().wait()
            there.append(Answering(owner))
            asyncio.get_running_loop().call_soon(
                owner.handshaken, cast("Channel", there[0]), cast("Any", None)
            )
            return cast("Channel", there[0])

        made = PeerLink(
            THERE, cast("Dial", dial), PeerSettings(ping_seconds=0.01, down_seconds=0.05),
            Events(None, Counter()), cast("Listener", told), Ping(kvd_id="here", kvd_generation="g"),
            silences=Silences(pause=lambda: 60.0),
        )  # fmt: skip
        try:
            async with asyncio.timeout(10):
                while made.state != "up":  # noqa: ASYNC110 - a link announces nothing
                    await asyncio.sleep(0)
                await asyncio.sleep(0.1)
                await talk(made, there[0], told)
        finally:
            await made.close()

    asyncio.run(run())


def test_a_link_that_nobody_needs_is_left_alone_until_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(made: PeerLink, there: Answering, told: Told) -> None:
        assert there.pings == 1
        assert isinstance(await made.ask(Ping(kvd_id="here", kvd_generation="g"), 5), Pong)
        while there.pings < 3:  # noqa: ASYNC110 - a ping announces nothing
            await asyncio.sleep(0)
        told.used = (("p", "g"),)
        made._hurry.set()
        while there.pings < 8:  # noqa: ASYNC110 - a ping announces nothing
            await asyncio.sleep(0)

    answered(talk, monkeypatch)


def test_a_quiet_peer_that_does_not_answer_others_is_asked_at_once_and_down_as_soon_as_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def talk(made: PeerLink, there: Answering, told: Told) -> None:
        there.answers = False
        since = time.monotonic()
        await asyncio.sleep(0.04)
        assert there.pings == 1
        assert made.suspect(since)
        while not told.down:  # noqa: ASYNC110 - a link announces nothing
            await asyncio.sleep(0)
        assert there.pings > 1
        assert time.monotonic() - since >= 0.05
        assert not made.suspect(since)  # that is known now

    answered(talk, monkeypatch)


def test_a_fresh_answer_outweighs_what_others_say_and_one_of_before_the_last_ping_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others asked a host in vain just before it answered here for the last time."""

    async def talk(made: PeerLink, there: Answering, told: Told) -> None:
        there.answers = False
        others = made._silence.last_heard - 0.001
        made._silence.last_heard = time.monotonic() + 60.0
        assert not made.suspect(others)
        made._silence.last_heard = others + 0.001
        assert made.suspect(others)
        while not told.down:  # noqa: ASYNC110 - a link announces nothing
            await asyncio.sleep(0)
        assert there.pings > 1

    answered(talk, monkeypatch)


def test_what_others_say_of_a_peer_that_answers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(made: PeerLink, there: Answering, told: Told) -> None:
        for pings in range(2, 5):
            assert made.suspect(time.monotonic())
            while there.pings < pings:  # noqa: ASYNC110 - a ping announces nothing
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)
        assert (made.state, told.down) == ("up", [])

    answered(talk, monkeypatch)


def test_a_connection_that_a_quiet_link_loses_may_be_made_anew_before_the_peer_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def talk(made: PeerLink, there: Answering, told: Told) -> None:
        lost = time.monotonic()
        made.ended(cast("Channel", there), "closed")
        while not told.down:  # noqa: ASYNC110 - a link announces nothing
            await asyncio.sleep(0)
        assert time.monotonic() - lost >= 0.05

    answered(talk, monkeypatch)


def test_a_peer_of_another_version_is_told_of_once_with_both_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = WIRE_VERSION + 1

    async def talk(made: PeerLink, counters: Counter[str], _told: Told) -> None:
        pong = msgspec.msgpack.encode((other, 7, {"type": "pong"}))
        for _ in range(50):
            made.received(cast("Channel", None), Received(pong, 1, len(pong)), None)
        assert counters["peers.unreadable"] == 50
        (line,) = [line for line in caplog.messages if line.startswith("the kvd at there:1: ")]
        assert f"wire version {other}, this side speaks {WIRE_VERSION}" in line
        assert "give both hosts one version of kvd" in line

    linked(never, talk)


def test_who_asks_a_peer_that_is_down_hears_why_it_is() -> None:
    async def talk(made: PeerLink, _counters: Counter[str], _told: Told) -> None:
        made.kvd_id = "there"
        made.end("it speaks another version")
        with pytest.raises(PeerAway, match=r"down since .* s: it speaks another version"):
            await made.ask(Ping(kvd_id="here", kvd_generation="g"), 1)

    linked(never, talk)
