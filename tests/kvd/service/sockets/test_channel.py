"""One connection's budgets, on a pair of sockets: what is sent and not read, what is read in turn, how it ends."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from kvd.service.sockets import channel as channels
from kvd.service.sockets import router as routers
from kvd.service.sockets import unsent
from kvd.service.sockets.channel import Channel, ChannelEnd, SocketContext
from kvd.service.sockets.limits import UNSENT_PAUSE_BYTES
from kvd.service.sockets.poller import Poller
from kvd.service.sockets.reservations import Hold, Reservations
from kvd.service.sockets.router import Router
from kvd.service.sockets.unsent import Unsent
from kvd.wire.frame import encode
from kvd.wire.handshake import Pong
from kvd.wire.query import GetStatus
from kvd.wire.registration import Heartbeat
from kvd.wire.reply import Ok, Refused
from kvd.zmtp.connection import Connection, ConnectionLimits
from kvd.zmtp.curve import CurveClient, CurveServer, generate
from kvd.zmtp.events import Handshaken, Received, Subscribed, Unsubscribed
from kvd.zmtp.frames import LONG, buffers, command, header, metadata, named
from kvd.zmtp.greeting import greeting
from kvd.zmtp.null import Null

HELLO = greeting("NULL", as_server=False) + command(
    named(b"READY", metadata(Socket_Type=b"DEALER", Identity=b""))
)


class Owner:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.causes: list[ChannelEnd] = []

    def handshaken(self, channel: Channel, peer: Handshaken) -> None:
        pass

    def received(self, _channel: Channel, message: Received, hold: Hold | None) -> None:
        self.bodies.append(message.body)
        if hold is not None:
            hold.release()

    def subscribed(self, channel: Channel, event: Subscribed | Unsubscribed) -> None:
        pass

    def ended(self, _channel: Channel, cause: ChannelEnd) -> None:
        self.causes.append(cause)


class Pair:
    """A channel, and the socket at its other end."""

    def __init__(self, counted: Unsent) -> None:
        self.shared = SocketContext(Poller(Counter()), Reservations(), counted)
        self.owner = Owner()
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        zmtp = Connection("ROUTER", Null(), ConnectionLimits(message=1 << 20))
        self.channel = Channel(ours, zmtp, self.owner, self.shared, (0, 1), plain=True)
        self.theirs.setblocking(False)
        self.theirs.sendall(HELLO)


async def until(look: Callable[[], object]) -> None:
    """Return when it is so."""
    async with asyncio.timeout(10):
        while not look():  # noqa: ASYNC110 (what is looked at sets no event)
            await asyncio.sleep(0.001)


def served(talk: Callable[[Pair], Awaitable[None]], counted: Unsent | None = None) -> None:
    """Run ``talk`` with a channel that is served."""

    async def run() -> None:
        pair = Pair(counted or Unsent())
        serving = asyncio.get_running_loop().create_task(pair.shared.poller.run())
        try:
            await until(lambda: pair.channel.ready)
            await talk(pair)
        finally:
            serving.cancel()
            pair.channel.end()
            pair.theirs.close()
            pair.shared.poller.close()
        assert not pair.shared.unsent.total
        assert not pair.shared.reservations.total

    asyncio.run(run())


def test_who_does_not_read_is_not_read_from_and_reads_all_later() -> None:
    async def talk(pair: Pair) -> None:
        body = bytes(4000)
        while pair.channel.unsent <= UNSENT_PAUSE_BYTES:
            pair.channel.send(b"", body)
        pair.theirs.sendall(buffers(b"question")[0])
        await asyncio.sleep(0.02)
        assert pair.owner.bodies == []
        got = 0
        while not pair.owner.bodies:
            await asyncio.sleep(0)
            try:
                got += len(pair.theirs.recv(1 << 16))
            except BlockingIOError:
                continue
        assert got > UNSENT_PAUSE_BYTES // 2
        assert pair.owner.bodies == [b"question"]

    served(talk)


def test_who_reads_nothing_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(pair: Pair) -> None:
        while not pair.channel.unsent:
            pair.channel.send(b"", bytes(1 << 16))
        pair.shared.unsent.sweep()
        assert not pair.owner.causes
        monkeypatch.setattr(unsent, "UNREAD_SECONDS", -1.0)
        pair.shared.unsent.sweep()
        assert pair.owner.causes == ["unread"]

    served(talk)


def test_over_the_total_who_is_at_one_message_for_longest_goes() -> None:
    async def talk(pair: Pair) -> None:
        pair.channel.send(b"", bytes(1 << 20))
        pair.channel.first_since = time.monotonic() - 5
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        late = Owner()
        zmtp = Connection("ROUTER", Null(), ConnectionLimits(message=1))
        other = Channel(ours, zmtp, late, pair.shared, (0, 2), plain=True)
        other.send(b"", bytes(4 << 20))
        assert (pair.owner.causes, late.causes) == (["unread"], [])
        other.end()
        theirs.close()

    served(talk, Unsent(4 << 20))


def test_a_large_frame_is_read_once_there_is_room_for_it() -> None:
    async def talk(pair: Pair) -> None:
        reservations = pair.shared.reservations
        taken = reservations.ask((0, 1), 32 << 20, lambda: None)
        pair.theirs.sendall(bytes((LONG,)) + (100_000).to_bytes(8, "big") + bytes(9000))
        await asyncio.sleep(0.02)
        pair.theirs.sendall(bytes(91_000))
        await asyncio.sleep(0.02)
        assert reservations.total == 32 << 20
        assert not pair.owner.bodies
        taken.release()
        await until(lambda: pair.owner.bodies)
        assert len(pair.owner.bodies[0]) == 100_000

    served(talk)


LARGE = bytes((LONG,)) + (100_000).to_bytes(8, "big") + bytes(100_000)


def test_a_frame_that_begins_behind_another_of_its_message_needs_room_of_its_own() -> None:
    """Under CURVE the end of a frame may be read together with the header of the next one."""

    async def talk(pair: Pair) -> None:
        (public, secret), (_, own_secret) = generate(), generate()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        limits = ConnectionLimits(message=16 << 20)
        server = Connection("ROUTER", CurveServer(secret, lambda _: True), limits)
        sealed = Channel(ours, server, pair.owner, pair.shared, (b"key", 0), plain=False)
        client = Connection("DEALER", CurveClient(own_secret, public), limits)
        loop = asyncio.get_running_loop()
        theirs.sendall(client.start())
        while not client.ready:
            list(client.receive(await loop.sock_recv(theirs, 1 << 16)))
            theirs.sendall(client.outgoing())
        await until(lambda: sealed.ready)
        reservations = pair.shared.reservations
        first = b"".join(client.message(bytes(20_000), b""))
        first = first[: 9 + int.from_bytes(first[1:9], "big")]
        theirs.sendall(first[:-4000])
        await until(lambda: reservations.total == len(first) - 9)
        taken = reservations.ask((b"key", 0), 24 << 20, lambda: None)
        large = 16_000_000
        await loop.sock_sendall(theirs, first[-4000:] + header(0, large) + bytes(1000))
        await until(lambda: reservations.total == 24 << 20)
        theirs.sendall(bytes(50_000))
        await asyncio.sleep(0.02)
        assert server.held == 1000, "it is read once there is room for it"
        taken.release()
        assert reservations.total == large
        await until(lambda: server.held == 51_000)
        sealed.end()
        theirs.close()

    served(talk)


def test_a_connection_that_its_own_answer_ends_keeps_no_room() -> None:
    most = 1 << 20
    counted = Unsent(most)

    async def talk(pair: Pair) -> None:
        while not pair.channel.unsent:
            pair.channel.send(b"", bytes(1000))
        pair.channel.first_since = time.monotonic() - 5
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        zmtp = Connection("ROUTER", Null(), ConnectionLimits(message=1))
        other = Channel(ours, zmtp, Owner(), pair.shared, (0, 2), plain=True)
        while (left := most - counted.total) > 85:  # an answer to a ping with its context takes some more
            other.send(b"", bytes(min(4000, max(1, left - 300))))
        assert not pair.channel.ended
        ping = command(named(b"PING", bytes(2) + b"context of it..."))
        pair.theirs.sendall(ping + bytes((LONG,)) + (100_000).to_bytes(8, "big"))
        await until(lambda: pair.owner.causes)
        other.end()
        theirs.close()
        assert pair.owner.causes == ["unread"]

    served(talk, counted)  # which looks at what is reserved afterwards


def test_who_does_not_finish_a_large_frame_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(pair: Pair) -> None:
        monkeypatch.setattr(channels, "FRAME_SECONDS", 0.02)
        pair.theirs.sendall(LARGE[:-1])
        await until(lambda: pair.owner.causes)
        assert pair.owner.causes == ["slow"]

    served(talk)


def test_a_frame_that_kvd_is_late_to_read_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(pair: Pair) -> None:
        monkeypatch.setattr(channels, "FRAME_SECONDS", 0.5)
        pair.theirs.sendall(LARGE[:50_000])
        await until(lambda: pair.shared.reservations.total)
        pair.theirs.sendall(LARGE[50_000:])
        time.sleep(0.6)  # noqa: ASYNC251 (the loop stands still)
        await until(lambda: pair.owner.bodies or pair.owner.causes)
        assert (len(pair.owner.bodies[0]), pair.owner.causes) == (100_000, [])

    served(talk)


def test_a_frame_that_kvd_pauses_to_read_has_more_time_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def talk(pair: Pair) -> None:
        monkeypatch.setattr(channels, "FRAME_SECONDS", 0.05)
        pair.theirs.sendall(LARGE[:50_000])
        await until(lambda: pair.shared.reservations.total)
        while pair.channel.unsent <= UNSENT_PAUSE_BYTES:
            pair.channel.send(b"", bytes(4000))
        began = time.monotonic()
        pair.theirs.sendall(LARGE[50_000:])
        await until(lambda: pair.owner.causes)
        assert pair.owner.causes == ["slow"]
        assert time.monotonic() - began > 0.1

    served(talk)


def test_what_was_sent_before_the_end_is_read() -> None:
    async def talk(pair: Pair) -> None:
        pair.theirs.sendall(b"".join(buffers(b"%d" % number)[0] for number in range(50)))
        pair.theirs.close()
        await until(lambda: pair.owner.causes)
        assert len(pair.owner.bodies) == 50
        assert pair.owner.causes == ["closed"]

    served(talk)


def test_a_client_that_leaves_is_not_waited_for() -> None:
    async def talk(pair: Pair) -> None:
        router = Router("local", Counter(), 10)
        router.joined(pair.channel)
        asked = asyncio.ensure_future(router.ask(pair.channel.route, Heartbeat(incarnation="i"), 60.0))
        await asyncio.sleep(0)
        router.left(pair.channel, "closed")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asked
        with pytest.raises(TimeoutError):
            await router.ask(pair.channel.route, Heartbeat(incarnation="i"), 60.0)

    served(talk)


def test_an_answer_that_cannot_be_encoded_is_kvds_fault_and_the_asker_hears_of_it() -> None:
    async def talk(pair: Pair) -> None:
        counters: Counter[str] = Counter()
        router = Router("local", counters, 10)
        router.handlers = {
            GetStatus: lambda _caller, _message: Pong(kvd_id=cast("str", object()), kvd_generation="")
        }
        router.joined(pair.channel)
        pair.theirs.setblocking(True)
        pair.theirs.recv(1 << 16)  # the handshake
        question = encode(GetStatus(), 7)
        router.received(pair.channel, Received(question, 1, len(question)), None)
        frame = pair.theirs.recv(1 << 16)
        assert b"KVD-INTERNAL" in frame
        assert (counters["errors.internal"], counters["received.malformed"]) == (1, 0)

    served(talk)


def test_what_was_sent_last_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(pair: Pair) -> None:
        monkeypatch.setattr(routers, "LAST_SECONDS", 0.01)
        router = Router("local", Counter(), 10)
        router.joined(pair.channel)
        message = Refused(code="X", message="x")
        router.send(pair.channel.route, message)
        held = sys.getrefcount(message)
        await until(lambda: sys.getrefcount(message) < held)

    served(talk)


def test_what_was_sent_is_kept_no_longer_than_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy kvd sends tens of thousands of messages a second."""

    async def talk(pair: Pair) -> None:
        monkeypatch.setattr(routers, "LAST_SECONDS", 3600.0)
        router = Router("local", Counter(), 1000)
        router.joined(pair.channel)
        timers: list[object] = []
        later = asyncio.get_running_loop().call_later

        def counted(*given: Any) -> asyncio.TimerHandle:
            timers.append(given)
            return later(*given)

        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", counted)
        messages = [Refused(code="X", message=f"{number}") for number in range(100)]
        before = sys.getrefcount(messages[0])
        for message in messages:
            router.send(pair.channel.route, message)
        del message
        kept = [number for number in range(100) if sys.getrefcount(messages[number]) > before]
        assert kept == [99]
        assert len(timers) == 1

    served(talk)


def test_an_answer_counts_only_on_the_connection_that_was_asked() -> None:
    async def talk(pair: Pair) -> None:
        counters: Counter[str] = Counter()
        router = Router("local", counters, 10)
        router.joined(pair.channel)
        asked = asyncio.ensure_future(router.ask(pair.channel.route, GetStatus(), 60.0))
        await asyncio.sleep(0)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        zmtp = Connection("ROUTER", Null(), ConnectionLimits(message=1))
        other = Channel(ours, zmtp, pair.owner, pair.shared, (0, 2), plain=True)
        router.joined(other)
        answer = encode(Ok(), 1)
        router.received(other, Received(answer, 1, len(answer)), None)
        assert (asked.done(), counters["received.unexpected"]) == (False, 1)
        router.received(pair.channel, Received(answer, 1, len(answer)), None)
        assert await asked == Ok()
        other.end()
        theirs.close()

    served(talk)
