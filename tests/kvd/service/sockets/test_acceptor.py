"""Who is let in where a listening socket is full."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from kvd.service.sockets.acceptor import Acceptor, ListenerSpec
from kvd.service.sockets.channel import SocketContext
from kvd.service.sockets.limits import share_of
from kvd.service.sockets.poller import Poller
from kvd.service.sockets.reservations import Reservations
from kvd.service.sockets.router import Router
from kvd.service.sockets.unsent import Unsent
from kvd.zmtp.connection import ConnectionLimits
from kvd.zmtp.frames import command, metadata, named
from kvd.zmtp.greeting import greeting
from kvd.zmtp.null import Null

HELLO = greeting("NULL", as_server=False) + command(
    named(b"READY", metadata(Socket_Type=b"DEALER", Identity=b""))
)
MOST = 8


class Full:
    """A socket of which one user has its whole share; all its clients have said what they are."""

    def __init__(self, listening: socket.socket, path: str) -> None:
        self.counters: Counter[str] = Counter()
        self.poller = Poller(self.counters)
        shared = SocketContext(self.poller, Reservations(), Unsent())
        spec = ListenerSpec("local", "ROUTER", Null(), ConnectionLimits(message=1 << 16), MOST)
        self.acceptor = Acceptor(listening, spec, Router("local", self.counters, 10), shared, self.counters)
        self.clients: list[socket.socket] = []
        self._path = path

    async def connect(self, what: str) -> None:
        """One client more, until it is counted as ``what``."""
        before = self.counters[what]
        client = socket.socket(socket.AF_UNIX)
        self.clients.append(client)
        client.connect(self._path)
        client.sendall(HELLO)
        async with asyncio.timeout(10):
            while self.counters[what] == before or any(not one.ready for one in self.acceptor.open):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def test_kvd_is_let_in_to_itself_where_the_share_of_its_user_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            listening.listen()
            listening.setblocking(False)
            full = Full(listening, str(tmp_path / "s"))
            serving = asyncio.get_running_loop().create_task(full.poller.run())
            pid = os.getpid()
            monkeypatch.setattr(os, "getpid", lambda: 0)  # these are other processes of the same user
            for _ in range(share_of(MOST)):
                await full.connect("connections.local.accepted")
            await full.connect("connections.local.refused")
            monkeypatch.setattr(os, "getpid", lambda: pid)
            await full.connect("connections.local.accepted")
            assert full.counters["connections.local.refused"] == 1
            assert len(full.acceptor.open) == share_of(MOST) + 1
            serving.cancel()
            full.acceptor.close()
            full.poller.close()
            for client in full.clients:
                client.close()

    asyncio.run(talk())
