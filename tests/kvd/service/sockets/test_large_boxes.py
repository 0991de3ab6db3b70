"""Large sealed messages: opened on another thread, while kvd's loop serves everybody else."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from kvd.service.sockets.channel import Channel, SocketContext
from kvd.service.sockets.poller import Poller
from kvd.service.sockets.reservations import Reservations
from kvd.service.sockets.unsent import Unsent
from kvd.zmtp import curve
from kvd.zmtp.connection import LARGE_BOX, Connection, ConnectionLimits
from kvd.zmtp.curve import CurveClient, CurveServer
from tests.kvd.service.sockets.test_channel import Owner, until


class Later(Executor):
    """Does nothing before it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.jobs.append((done, partial(fn, *args)))
        return done

    def work(self) -> None:
        done, job = self.jobs.pop(0)
        done.set_result(job())


class Sealed:
    """A channel of a CURVE server, the connection of its client, and the socket between."""

    def __init__(self, shared: SocketContext) -> None:
        server, client = curve.generate(), curve.generate()
        limits = ConnectionLimits(message=1 << 20)
        self.owner, self.shared = Owner(), shared
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        self.theirs.setblocking(False)
        zmtp = Connection("ROUTER", CurveServer(server[1], bool), limits)
        self.channel = Channel(ours, zmtp, self.owner, shared, (0, 1), plain=False)
        self.client = Connection("DEALER", CurveClient(client[1], server[0]), limits)

    async def shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.theirs, self.client.start())
        while not self.client.ready:
            list(self.client.receive(await loop.sock_recv(self.theirs, 4096)))
            await loop.sock_sendall(self.theirs, self.client.outgoing())

    async def send(self, *messages: bytes) -> None:
        for message in messages:
            for buffer in self.client.message(message):
                await asyncio.get_running_loop().sock_sendall(self.theirs, buffer)

    def close(self) -> None:
        self.channel.end()
        self.theirs.close()


def opened_later(talk: Callable[[Sealed, Sealed, Later], Awaitable[None]]) -> None:
    """Run ``talk`` with two sealed channels that share who opens their large boxes."""

    async def run() -> None:
        later = Later()
        shared = SocketContext(Poller(Counter()), Reservations(), Unsent(), later)
        one, other = Sealed(shared), Sealed(shared)
        serving = asyncio.get_running_loop().create_task(shared.poller.run())
        try:
            await one.shake_hands()
            await other.shake_hands()
            await talk(one, other, later)
        finally:
            serving.cancel()
            one.close()
            other.close()
            shared.poller.close()
        assert not shared.reservations.total

    asyncio.run(run())


def test_a_large_box_is_opened_elsewhere_and_others_are_served_meanwhile() -> None:
    async def talk(one: Sealed, other: Sealed, later: Later) -> None:
        large = bytes(LARGE_BOX)
        await one.send(large, b"after it")
        await until(lambda: later.jobs)
        await other.send(b"meanwhile")
        await until(lambda: other.owner.bodies)
        assert other.owner.bodies == [b"meanwhile"]
        assert one.owner.bodies == [], "nothing of it is handed over, nor what follows"
        later.work()
        await until(lambda: len(one.owner.bodies) == 2)
        assert one.owner.bodies == [large, b"after it"]
        assert not later.jobs

    opened_later(talk)


def test_a_connection_may_end_while_its_box_is_opened_and_keeps_its_room_until_that_is_done() -> None:
    """Whoever sends boxes and ends its connections had as many of them in memory as it liked."""

    async def talk(one: Sealed, _other: Sealed, later: Later) -> None:
        await one.send(bytes(LARGE_BOX))
        await until(lambda: later.jobs)
        reserved = one.shared.reservations
        one.channel.end()
        assert reserved.total > LARGE_BOX
        later.work()
        await until(lambda: not reserved.total)
        assert (one.owner.bodies, one.owner.causes) == ([], ["told"])

    opened_later(talk)
