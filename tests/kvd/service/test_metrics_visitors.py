"""Who connects to kvd's page for machines and then says nothing, or reads nothing, keeps nobody else from it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvd.service import metrics
from kvd.service.metrics import render
from kvd.wire.identity import Endpoint
from kvd.wire.query import KvdStatus

LARGE = KvdStatus(
    kvd_id="k", generation="g", version="1", pid=1, host="h", started=0.0, runtime_dir="/", endpoint=Endpoint(),
    counters={f"c{number:05d}{'x' * 500}": 1 for number in range(8000)}, gauges={},
)  # fmt: skip
"""A page of 8 MB."""
PROBE = b"GET /healthz HTTP/1.1\r\n\r\n"
SCRAPE = b"GET /metrics HTTP/1.1\r\n\r\n"


def descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def never() -> metrics.Told:
    await asyncio.Event().wait()
    raise AssertionError


async def large() -> metrics.Told:
    return metrics.Told(LARGE)


def served(talk: Callable[[int], Awaitable[None]], now: metrics.Now) -> None:
    """Run ``talk`` with the port of a page."""

    async def run() -> None:
        server = await metrics.listen("127.0.0.1", 0, now)
        await talk(server.sockets[0].getsockname()[1])
        server.close()

    asyncio.run(run())


async def connected(port: int, request: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    """A connection from one of this host's addresses on which a request was sent, if any; it has little room."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.bind((host, 0))
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    if request:
        await asyncio.get_running_loop().sock_sendall(made, request)
    return made


async def probed(port: int, host: str = "127.0.0.1") -> bytes:
    """How a liveness probe is answered."""
    with await connected(port, PROBE, host) as probe:
        return await asyncio.get_running_loop().sock_recv(probe, 100)


@pytest.mark.parametrize("request_", [b"", SCRAPE])
def test_a_probe_is_answered_whoever_keeps_connections(request_: bytes) -> None:
    """The 65th connection was refused, and a manager that got no answer had kvd killed."""

    async def talk(port: int) -> None:
        kept = [await connected(port, request_) for _ in range(metrics.MAX_CONNECTIONS)]
        kept += [
            await connected(port, request_, f"127.0.{host}.1")
            for host in range(1, 6)
            for _ in range(metrics.MAX_CONNECTIONS_HOST)
        ]
        assert (await probed(port)).startswith(b"HTTP/1.1 200")
        assert (await probed(port, "127.0.9.1")).startswith(b"HTTP/1.1 200")
        for one in kept:
            one.close()

    served(talk, never)


def test_who_reads_nothing_is_ended_and_costs_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 0.3)

    async def talk(port: int) -> None:
        before = descriptors()
        kept = [await connected(port, SCRAPE) for _ in range(2)]
        async with asyncio.timeout(10):
            while descriptors() != before + 2 * len(kept):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while descriptors() != before + len(kept):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for one in kept:
            one.close()

    served(talk, large)


def test_a_head_without_an_end_is_cut_and_costs_nothing() -> None:
    """Lines of two bytes were taken for five seconds, of each connection as many as came."""

    async def talk(port: int) -> None:
        loop = asyncio.get_running_loop()
        for lines in (b"a\n" * metrics.MAX_HEAD_BYTES, b"a" * metrics.MAX_HEAD_BYTES + b"\n\n"):
            with await connected(port) as one, contextlib.suppress(ConnectionError):
                await loop.sock_sendall(one, b"GET /healthz HTTP/1.1\n" + lines)
                async with asyncio.timeout(metrics.REQUEST_SECONDS / 2):
                    assert await loop.sock_recv(one, 100) == b""

    served(talk, large)


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n", b"\r\nHost: a\r\n\r\n", b"\nHost: a\n\r\n"])
def test_a_head_may_come_byte_by_byte(end: bytes) -> None:
    async def talk(port: int) -> None:
        loop = asyncio.get_running_loop()
        with await connected(port) as one:
            for byte in b"GET /healthz HTTP/1.1" + end:
                await loop.sock_sendall(one, bytes((byte,)))
                await asyncio.sleep(0)
            assert (await loop.sock_recv(one, 100)).startswith(b"HTTP/1.1 200")

    served(talk, large)


def test_pages_are_made_one_after_the_other_with_turns_in_between() -> None:
    """Eight of them took one turn of the loop of as many pages' time."""
    turns: list[float] = []

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0)
            turns.append(time.monotonic() - began)

    async def talk(port: int) -> None:
        kept = [await connected(port, SCRAPE) for _ in range(8)]
        watching = asyncio.create_task(watch())
        for one in kept:
            assert await asyncio.get_running_loop().sock_recv(one, 100)
        watching.cancel()
        for one in kept:
            one.close()

    began = time.monotonic()
    render(LARGE)
    alone = time.monotonic() - began
    served(talk, large)
    assert max(turns) < 4 * alone, (max(turns), alone)
