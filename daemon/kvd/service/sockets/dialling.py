"""Connections that kvd makes, to other kvds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvd.service.sockets.acceptor import keep_alive
from kvd.service.sockets.channel import Channel, ChannelOwner, SocketContext
from kvd.service.sockets.resolver import Resolver
from kvd.wire.identity import Endpoint
from kvd.zmtp.connection import Connection, ConnectionLimits
from kvd.zmtp.curve import CurveClient
from kvd.zmtp.mechanism import Mechanism
from kvd.zmtp.null import Null

CONNECT_SECONDS = 2.0
"""How long one address of a host may take to accept a connection."""
MOST_ADDRESSES = 4
"""Addresses of a host that are tried."""


DialKind = Literal["known", "first", "again"]
"""A peer that has answered before; a place that is tried for the first time; one that failed."""
DIALS_A_TICK = 8
TICK_SECONDS = 0.005
"""1,600 connections a second at most: many places that a client names must not keep the loop from everything else."""


class DialPace:
    """Lets few connections begin at a time, those to known peers first."""

    def __init__(self) -> None:
        self._waiting: dict[DialKind, deque[asyncio.Future[None]]] = {
            "known": deque(), "first": deque(), "again": deque(),
        }  # fmt: skip
        self._left = DIALS_A_TICK
        self._ticking = False

    async def turn(self, kind: DialKind) -> None:
        """Return when a connection may begin."""
        loop = asyncio.get_running_loop()
        if not self._ticking:
            self._ticking = True
            loop.call_later(TICK_SECONDS, self._tick)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting[kind].append(turn)
        await turn

    def _tick(self) -> None:
        self._left = DIALS_A_TICK
        for waiting in self._waiting.values():
            while waiting and self._left:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    self._left -= 1
        self._ticking = self._left < DIALS_A_TICK
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)


@dataclass(frozen=True, slots=True)
class Dialler:
    """Makes connections that share the budgets of all others. A message may have ``message_bytes``."""

    shared: SocketContext
    message_bytes: int
    resolver: Resolver = field(default_factory=Resolver)
    pace: DialPace = field(default_factory=DialPace)

    async def look_up(self, host: str, *, kept: bool) -> None:
        """Find the addresses of a host, so that who dials it next has them."""
        with contextlib.suppress(OSError):
            await self.resolver.resolve(host, kept=kept)

    async def dial(
        self,
        endpoint: Endpoint,
        owner: ChannelOwner,
        secret: bytes,
        key: bytes,
        kind: DialKind,
        *,
        kept: bool,
    ) -> Channel:
        """A connection on which the handshake has begun. ``secret`` is our key and ``key`` theirs, empty for NULL.

        ``kept``: the operator wrote the peer down. Raises `OSError` and `TimeoutError`.
        """
        addresses = (await self.resolver.resolve(endpoint.host, kept=kept))[:MOST_ADDRESSES]
        trouble = OSError(f"{endpoint.host!r} has no address")
        for family, address in addresses:
            await self.pace.turn(kind)
            try:
                connected = await _connected(family, address, endpoint.port)
            except OSError as error:  # TimeoutError is one
                trouble = error
                continue
            mechanism: Mechanism = CurveClient(secret, key) if key else Null()
            zmtp = Connection("DEALER", mechanism, ConnectionLimits(message=self.message_bytes))
            return Channel(connected, zmtp, owner, self.shared, ("kvd", endpoint), plain=not key)
        raise trouble


async def _connected(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        keep_alive(made)
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(made, (address, port))
        stack.pop_all()
        return made
