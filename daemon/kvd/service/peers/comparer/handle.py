"""One process that compares engines, as kvd sees it: started, asked, and ended when it must be."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time

import msgspec

from kvd.service.errors import RequestRefused
from kvd.service.peers.comparer.messages import FRAME, CompareJob, CompareSides, FindShape, Found, Side
from kvd.wire.card_parts import part_from
from kvd.wire.identity import EngineCard

END_SECONDS = 1.0
"""A process that has closed its socket has ended by then."""
LARGE_BYTES = 8 << 20
"""A process that read this much is ended afterwards: it would keep the memory."""
ANSWER_BYTES = 16 << 20
_FOUND = msgspec.msgpack.Decoder(Found)
_ENCODER = msgspec.msgpack.Encoder()


class ComparerProcess:
    """One process, for one turn at a time."""

    def __init__(self) -> None:
        """Start one. Raises `OSError`."""
        self.spoilt = False
        self._bytes = 0
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._socket, theirs = socket.socketpair()
        # It tells systemd nothing, and starts no threads for numbers that are added on one.
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("NOTIFY_", "WATCHDOG_", "LISTEN_"))
        }
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "kvd.service.peers.comparer.process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                )
        except OSError:
            self._socket.close()
            raise

    @property
    def lives(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None and not self._reader.at_eof()

    async def hello(self) -> None:
        """Wait until it has imported what it needs."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        await self._answer()

    async def code(self) -> int | None:
        """How it ended, as of `subprocess.Popen`; None where it still runs though it closed its socket."""
        until = time.monotonic() + END_SECONDS
        while (code := self._process.poll()) is None and time.monotonic() < until:  # noqa: ASYNC110 - see `end`
            await asyncio.sleep(0.005)
        return code

    async def shape(self, peer: EngineCard) -> Found:
        """The shape that it finds, or why there is none."""
        await self._tell(peer, local=False)
        return await self._ask(FindShape())

    async def compare(self, local: EngineCard) -> Found:
        """The factors that it finds. Raises `RequestRefused` where the two cannot be compared."""
        await self._tell(local, local=True)
        found = await self._ask(CompareSides())
        if found.refusal:
            raise RequestRefused(
                "KVD-COMPARE-LIMIT",
                f"engine {local.engine.engine_id!r} and its peer cannot be compared: {found.refusal}",
                hint="no real engine takes that: look at its card with `kvctl describe-topology`",
            )
        return found

    async def end(self) -> None:
        """Kill it and see it end."""
        self._process.kill()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        while self._process.poll() is None:  # noqa: ASYNC110 - a killed process is gone within milliseconds
            await asyncio.sleep(0.005)

    async def _tell(self, card: EngineCard, *, local: bool) -> None:
        empty = msgspec.structs.replace(card, workers=(), digest_key=b"")
        first, total = 0, 1
        while first < total:
            part = part_from(card, first)
            first, total = part.next, part.total
            await self._put(Side(local=local, card=empty, part=part))
            await asyncio.sleep(0)  # so much for one turn of the loop

    async def _ask(self, question: FindShape | CompareSides) -> Found:
        await self._put(question)
        found = await self._answer()
        self.spoilt |= bool(found.refusal) or self._bytes > LARGE_BYTES
        return found

    async def _answer(self) -> Found:
        size = int.from_bytes(await self._reader.readexactly(FRAME))
        if size > ANSWER_BYTES:
            raise msgspec.ValidationError(f"an answer of {size} bytes, at most {ANSWER_BYTES} are taken")
        return _FOUND.decode(await self._reader.readexactly(size))

    async def _put(self, message: CompareJob) -> None:
        if self._writer is None:
            raise ConnectionError("it was not waited for")
        data = _ENCODER.encode(message)
        self._bytes += len(data)
        self._writer.write(len(data).to_bytes(FRAME) + data)
        await self._writer.drain()
