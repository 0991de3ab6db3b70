"""A TCP connection to somebody who may lie, trickle or say nothing: bounded in time and in bytes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvctl.errors import CheckFailed, PeerTimeout

MOST_BYTES = 8 << 20
"""Bytes of one answer. Metadata of an engine with 1,000 regions are 70 KB."""
_READ = 64 << 10


class StockUnreachable(PeerTimeout):
    """Nothing listens at the address of a stock connector."""

    code = "KVD-STOCK-UNREACHABLE"


class StockSilent(PeerTimeout):
    """Somebody listens at the address of a stock connector and does not answer in time."""

    code = "KVD-STOCK-SILENT"


class StockGarbage(CheckFailed):
    """What answers at the address of a stock connector is none, or tells what cannot be."""

    code = "KVD-STOCK-GARBAGE"


@dataclass
class Line:
    """One connection. ``until`` is by `time.monotonic`; ``left`` is how many bytes more are taken."""

    where: str
    socket: socket.socket
    until: float
    seconds: float
    left: int = MOST_BYTES

    def write(self, data: bytes) -> None:
        """Send all of ``data``. Raises `StockSilent`."""
        try:
            self._limit()
            self.socket.sendall(data)
        except OSError as error:
            raise self._broken(error) from None

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes. Raises `StockSilent`, and `StockGarbage` where it is too much or ends early."""
        if size > self.left:
            raise StockGarbage(
                f"{self.where} sends {size} bytes where at most {self.left} more are taken",
                "is that the port of a side channel? vLLM logs it: VLLM_NIXL_SIDE_CHANNEL_PORT",
            )
        found = bytearray()
        while len(found) < size:
            data = self._received(min(_READ, size - len(found)))
            if not data:
                raise StockGarbage(
                    f"{self.where} ends the connection after {len(found)} of {size} bytes",
                    "what listens there is no stock connector, or its engine or its listener just ended: ask again",
                )
            found += data
        return bytes(found)

    def rest(self) -> bytes:
        """All until the peer ends the connection. Raises as `read`."""
        found = bytearray()
        while data := self._received(min(_READ, self.left + 1)):
            found += data
            if self.left < 0:
                raise StockGarbage(
                    f"{self.where} sends more than {MOST_BYTES} bytes",
                    "is that the port of Mooncake's bootstrap server? VLLM_MOONCAKE_BOOTSTRAP_PORT, 8998",
                )
        return bytes(found)

    def _received(self, size: int) -> bytes:
        try:
            self._limit()
            data = self.socket.recv(size)
        except OSError as error:
            raise self._broken(error) from None
        self.left -= len(data)
        return data

    def _limit(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)

    def _broken(self, error: OSError) -> PeerTimeout:
        if isinstance(error, TimeoutError):
            return StockSilent(
                f"{self.where} took the connection and did not answer within {self.seconds:g} s",
                "LISTENER_DEAD: its engine may be healthy all the same. Is the process stopped or starting? Restart it"
                " where requests fail at the handshake",
            )
        return StockSilent(
            f"{self.where} ended the connection: {error.strerror or error}",
            "is its engine stopping? ask again",
        )


@contextmanager
def connected(host: str, port: int, seconds: float) -> Iterator[Line]:
    """A connection that ends ``seconds`` from now at the latest. Raises `StockUnreachable`."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        made = socket.create_connection((host, port), timeout=seconds)
    except (OSError, UnicodeError) as error:  # the latter for what is no name of a host
        why = getattr(error, "strerror", None) or error
        raise StockUnreachable(
            f"nothing answers at {where}: {why}",
            "LISTENER_DEAD where the engine serves: one malformed question ends NixlConnector's listener for good, and"
            " only a restart brings it back. Else: do host and port agree with VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT"
            " (localhost:5600, plus the data parallel index), or with Mooncake's bootstrap port (8998)?",
        ) from None
    with made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Line(where, made, time.monotonic() + seconds, seconds)
