"""One listening socket: who is let in, how many of whom, and for how long without a word."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from kvd.service.fairness.queue import Path
from kvd.service.sockets.channel import Channel, ChannelEnd, SocketContext
from kvd.service.sockets.limits import (
    ACCEPT_PAUSE_SECONDS,
    ACCEPTS_A_TURN,
    HANDSHAKE_SECONDS,
    NO_DESCRIPTORS_PAUSE_SECONDS,
    share_of,
)
from kvd.service.sockets.poller import READ
from kvd.service.sockets.refusals import Refusals
from kvd.service.sockets.reservations import Hold
from kvd.zmtp.connection import Connection, ConnectionLimits, SocketType
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, Received, Subscribed, Unsubscribed
from kvd.zmtp.mechanism import Mechanism

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
OURSELVES = "kvd itself"
"""Whose kvd's own connection to itself is (see `SelfCheck`): of no user, so that no user's share can be full for it."""
DEAD_SECONDS = 10
"""After this long the kernel ends a TCP connection whose other host is silent; kvds speak every second."""


class Service(Protocol):
    """What stands behind a listening socket."""

    def joined(self, channel: Channel) -> None:
        """A connection may be used from now on."""

    def received(self, channel: Channel, message: Received, hold: Hold | None, /) -> None:
        """A message; see `ChannelOwner`."""

    def subscribed(self, channel: Channel, event: Subscribed | Unsubscribed) -> None:
        """The peer wants events, or no more."""

    def left(self, channel: Channel, cause: ChannelEnd) -> None:
        """A connection that had joined is over."""


@dataclass(slots=True)
class OwnersConnections:
    """Connections of one user or address; ``silent`` are those that have not said what they are, the oldest first."""

    count: int = 0
    silent: OrderedDict[Channel, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class ListenerSpec:
    """What a listening socket speaks. ``name`` is in its counters, ``most`` is how many connections it has at most."""

    name: str
    socket_type: SocketType
    mechanism: Mechanism
    limits: ConnectionLimits
    most: int


class Acceptor:
    """Accepts connections of one listening socket, counts them, and ends those that are too many or too slow."""

    def __init__(
        self,
        listening: socket.socket,
        spec: ListenerSpec,
        service: Service,
        shared: SocketContext,
        counters: Counter[str],
    ) -> None:
        self.path: Path = ("listening", spec.name)
        self.mask, self.queued = 0, False
        self.spec = spec
        self.open: dict[Channel, Hashable] = {}
        """Connections, and whose each is."""
        self.refusals: Refusals | None = None
        self._socket, self._service, self._shared, self._counters = listening, service, shared, counters
        self._share = share_of(spec.most)
        self._owners: dict[Hashable, OwnersConnections] = {}
        self._silent: OrderedDict[Channel, float] = OrderedDict()
        shared.poller.add(listening.fileno(), self, READ)

    def step(self) -> bool:
        """Accept a few, then pause: who only connects must not keep others waiting."""
        self.mask = 0
        pause = ACCEPT_PAUSE_SECONDS
        for _ in range(ACCEPTS_A_TURN):
            try:
                connected, address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                self._counters[f"connections.{self.spec.name}.accept_failed"] += 1
                log.warning("%s socket: a connection cannot be accepted: %s", self.spec.name, error.strerror)
                pause = NO_DESCRIPTORS_PAUSE_SECONDS
                break
            self._counters[f"connections.{self.spec.name}.accepted"] += 1
            self._open(connected, address)
        self._shared.poller.change(self._socket.fileno(), 0)
        asyncio.get_running_loop().call_later(pause, self._accept_again)
        return False

    def sweep(self) -> None:
        """End connections that have not said what they are for too long."""
        before = time.monotonic() - HANDSHAKE_SECONDS
        while self._silent:
            channel = next(iter(self._silent))
            if self._silent[channel] > before:
                break
            channel.end("slow")

    def close(self) -> None:
        """End all connections and stop listening. Idempotent."""
        if self._socket.fileno() >= 0:
            self._shared.poller.remove(self._socket.fileno())
            self._socket.close()
        for channel in list(self.open):
            channel.end()

    # --- what channels tell ---

    def handshaken(self, channel: Channel, peer: Handshaken) -> None:
        """It is silent no more."""
        del self._silent[channel]
        del self._owners[self.open[channel]].silent[channel]
        if peer.key:
            channel.path = (peer.key, 0)
        self._service.joined(channel)

    def received(self, channel: Channel, message: Received, hold: Hold | None) -> None:
        """Its service handles it."""
        self._service.received(channel, message, hold)

    def subscribed(self, channel: Channel, event: Subscribed | Unsubscribed) -> None:
        """Its service notes what it wants to be sent."""
        self._service.subscribed(channel, event)

    def ended(self, channel: Channel, cause: ChannelEnd) -> None:
        """Count how."""
        owner = self.open.pop(channel)
        theirs = self._owners[owner]
        theirs.count -= 1
        spoke = self._silent.pop(channel, None) is None
        theirs.silent.pop(channel, None)
        if not theirs.count:
            del self._owners[owner]
        how = "ended" if spoke else "handshake_failed"
        if isinstance(cause, ZmtpError):
            if cause.kind == "not_authorised":
                how = "not_authorised"
            if self.refusals is not None and not spoke:
                self.refusals.note(owner, cause)
            log.log(
                logging.INFO if spoke else logging.DEBUG,
                "%s socket: a connection ends: %s", self.spec.name, cause.message,
            )  # fmt: skip
        self._counters[f"connections.{self.spec.name}.{how}"] += 1
        if spoke:
            self._service.left(channel, cause)

    # --- who is let in ---

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._shared.poller.change(self._socket.fileno(), READ)

    def _open(self, connected: socket.socket, address: object) -> None:
        path, pid, uid = _who(connected, address)
        if not self._admit(path[0]):
            self._counters[f"connections.{self.spec.name}.refused"] += 1
            connected.close()
            return
        connected.setblocking(False)
        spec = self.spec
        zmtp = Connection(spec.socket_type, spec.mechanism, spec.limits)
        channel = Channel(connected, zmtp, self, self._shared, path, plain=spec.mechanism.name == "NULL")
        channel.pid, channel.uid = pid, uid
        self.open[channel] = path[0]
        theirs = self._owners.setdefault(path[0], OwnersConnections())
        theirs.count += 1
        theirs.silent[channel] = None
        self._silent[channel] = time.monotonic()

    def _admit(self, owner: Hashable) -> bool:
        """Whether there is room for one more, which silent connections make, the oldest first."""
        if owner == OURSELVES:
            return True
        theirs = self._owners.get(owner)
        if theirs is not None and theirs.count >= self._share:
            silent: OrderedDict[Channel, None] | OrderedDict[Channel, float] = theirs.silent
        elif len(self.open) >= self.spec.most:
            silent = self._silent
        else:
            return True
        if not silent:
            return False
        next(iter(silent)).end("slow")
        return True


def _who(connected: socket.socket, address: object) -> tuple[Path, int, int]:
    """Whose a connection is, and its peer's pid and uid (0 and -1 where the kernel does not know)."""
    if connected.family == socket.AF_UNIX:
        found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        return (OURSELVES if pid == os.getpid() else uid, pid), pid, uid
    keep_alive(connected)
    return (network_of(address), 0), 0, -1


def network_of(address: object) -> Hashable:
    """What counts as one host of those that connect over the network: its address, or the network of one site."""
    host = str(address[0]) if isinstance(address, tuple) else ""
    if ":" in host and not host.startswith("::ffff:"):
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    return host


def keep_alive(connected: socket.socket) -> None:
    """Have a TCP connection send at once, and end soon after its other host is gone."""
    idle, between = DEAD_SECONDS // 2, DEAD_SECONDS // 5
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (DEAD_SECONDS - idle) // between),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000),
    ):
        connected.setsockopt(level, option, value)
