"""All sockets together: readers of events that do not read, and a kvd that stood still."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvd.service.config import Config
from kvd.service.sockets import acceptor, limits, sockets, unsent
from kvd.service.sockets.bind import bind_unix
from kvd.service.sockets.events import Events
from kvd.service.sockets.publisher import Publisher
from kvd.service.sockets.router import Router
from kvd.service.sockets.sockets import Sockets
from kvd.zmtp.frames import buffers, command, metadata, named
from kvd.zmtp.greeting import greeting

EVENT = "lease.opened"
SUBSCRIBER = (
    greeting("NULL", as_server=False)
    + command(named(b"READY", metadata(Socket_Type=b"SUB")))
    + buffers(b"\1")[0]
)


async def until(look: Callable[[], object]) -> None:
    """Return when it is so."""
    async with asyncio.timeout(10):
        while not look():  # noqa: ASYNC110 (what is looked at sets no event)
            await asyncio.sleep(0.001)


def served(talk: Callable[[Publisher, Events, Counter[str]], Awaitable[None]], folder: Path) -> None:
    """Run ``talk`` while sockets of events and of clients are served."""

    async def run() -> None:
        counters: Counter[str] = Counter()
        those = Sockets(counters)
        publisher = those.serve_events(bind_unix(folder / "events"))
        those.serve_local(bind_unix(folder / "local"), Router("local", counters, 10), Config())
        serving = asyncio.get_running_loop().create_task(those.run())
        try:
            await talk(publisher, Events(publisher, counters), counters)
        finally:
            serving.cancel()
            those.close()

    asyncio.run(run())


def connected(path: Path, hello: bytes) -> socket.socket:
    """A connection on which ``hello`` was sent."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(path))
    made.sendall(hello)
    made.setblocking(False)
    return made


async def told(reader: socket.socket, events: Events) -> bytes:
    """What a reader is sent when something happens."""
    events.emit(EVENT, "seen")
    received = b""
    async with asyncio.timeout(10):
        while b"seen" not in received:
            received += await asyncio.get_running_loop().sock_recv(reader, 1 << 16)
    return received


def test_readers_of_events_that_were_forgotten_take_nothing_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once these had filled all the room for events nobody got any, for good."""
    monkeypatch.setattr(sockets, "EVENTS_UNSENT_TOTAL_BYTES", 1 << 20)

    async def talk(publisher: Publisher, events: Events, counters: Counter[str]) -> None:
        path = tmp_path / "events"
        forgotten = [connected(path, SUBSCRIBER) for _ in range(4)]
        await until(lambda: counters["connections.events.accepted"] == len(forgotten))
        await until(lambda: publisher.wanted)
        while not counters["connections.events.ended"]:
            for _ in range(8):
                events.emit(EVENT, "r" * 40_000)
            await asyncio.sleep(0)
        honest = connected(path, SUBSCRIBER)
        await until(lambda: counters["connections.events.accepted"] == len(forgotten) + 1)
        await asyncio.sleep(0.02)
        assert b"seen" in await told(honest, events)
        for reader in (*forgotten, honest):
            reader.close()

    served(talk, tmp_path)


def test_a_reader_of_events_that_reads_nothing_for_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsent, "UNREAD_SECONDS", 0.1)

    async def talk(publisher: Publisher, events: Events, counters: Counter[str]) -> None:
        forgotten = connected(tmp_path / "events", SUBSCRIBER)
        await until(lambda: publisher.wanted)
        for _ in range(20):
            events.emit(EVENT, "r" * 40_000)
        await until(lambda: counters["connections.events.ended"])
        forgotten.close()

    served(talk, tmp_path)


def test_a_kvd_that_stood_still_judges_nobody_before_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP and SIGCONT: handshakes that were under way are not too slow."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 0.4)
    monkeypatch.setattr(sockets, "STOPPED_SECONDS", 0.1)

    async def talk(_publisher: Publisher, _events: Events, counters: Counter[str]) -> None:
        hello = greeting("NULL", as_server=False)
        client = connected(tmp_path / "local", hello[:20])
        await until(lambda: counters["connections.local.accepted"])
        time.sleep(0.5)  # noqa: ASYNC251 (the loop stands still)
        await asyncio.sleep(limits.TURN_SECONDS)
        client.sendall(hello[20:] + command(named(b"READY", metadata(Socket_Type=b"DEALER"))))
        await asyncio.sleep(0.05)
        assert not counters["connections.local.handshake_failed"]
        silent = connected(tmp_path / "local", hello[:20])
        await until(lambda: counters["connections.local.handshake_failed"])
        silent.close()
        client.close()

    served(talk, tmp_path)
