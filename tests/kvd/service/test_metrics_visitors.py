"""Who connects to kvd's page for machines and then says nothing, or reads nothing, keeps nobody else from it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvd.service import metrics
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
