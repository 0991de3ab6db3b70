"""One poller for all connections: a mistake with one of them costs the others nothing."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from kvd.service.fairness.queue import Path
from kvd.service.sockets.poller import READ, Poller


class Reader:
    """Reads what is there."""

    def __init__(self, stream: socket.socket) -> None:
        self.path: Path = (0, 0)
        self.mask, self.queued = 0, False
        self.got = b""
        self._stream = stream

    def step(self) -> bool:
        """Take it."""
        self.got += self._stream.recv(10)
        return False


def test_news_of_what_nobody_knows_stops_nothing() -> None:
    async def work() -> None:
        poller = Poller(Counter())
        pairs = [socket.socketpair() for _ in range(3)]
        readers = [Reader(ours) for ours, _ in pairs]
        for (ours, _), reader in zip(pairs, readers, strict=True):
            poller.add(ours.fileno(), reader, READ)
        del poller._members[pairs[1][0].fileno()]
        serving = asyncio.get_running_loop().create_task(poller.run())
        for _, theirs in pairs:
            theirs.send(b"x")
        async with asyncio.timeout(5):
            while [reader.got for reader in readers] != [b"x", b"", b"x"]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        serving.cancel()
        poller.close()
        for ours, theirs in pairs:
            ours.close()
            theirs.close()

    asyncio.run(work())
