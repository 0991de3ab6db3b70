"""All sockets of a kvd: what they share, and what has to be done for them from time to time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Collection

from kvd.service.config import Config
from kvd.service.sockets.acceptor import Acceptor, ListenerSpec, Service
from kvd.service.sockets.channel import SocketContext
from kvd.service.sockets.limits import (
    EVENTS_UNSENT_TOTAL_BYTES,
    MAX_TOPIC_BYTES,
    STOPPED_SECONDS,
    connection_counts,
)
from kvd.service.sockets.poller import Poller
from kvd.service.sockets.publisher import Publisher
from kvd.service.sockets.refusals import Refusals
from kvd.service.sockets.reservations import Reservations
from kvd.service.sockets.unsent import Unsent
from kvd.zmtp.connection import ConnectionLimits
from kvd.zmtp.mechanism import Mechanism
from kvd.zmtp.null import Null

SWEEP_SECONDS = 0.25
FLUSH_SECONDS = 0.3
"""How long the last answers may take to leave."""
_FLUSH_AGAIN_SECONDS = 0.005


class Sockets:
    """The listening sockets, and the budgets that all connections share."""

    def __init__(self, counters: Counter[str]) -> None:
        self.refusals = Refusals()
        """Who was not let in on the peer socket."""
        self.counts = connection_counts()
        self.poller = Poller(counters)
        self.shared = SocketContext(self.poller, Reservations(), Unsent())
        self._events = SocketContext(self.poller, self.shared.reservations, Unsent(EVENTS_UNSENT_TOTAL_BYTES))
        self._counters = counters
        self._acceptors: list[Acceptor] = []
        self._peers: Acceptor | None = None

    def serve_local(self, listening: socket.socket, service: Service, config: Config) -> None:
        """Serve workers and operators of this host."""
        limits = ConnectionLimits(message=config.local.max_message_bytes)
        spec = ListenerSpec("local", "ROUTER", Null(), limits, self.counts.local)
        self._acceptors.append(Acceptor(listening, spec, service, self.shared, self._counters))

    def serve_events(self, listening: socket.socket) -> Publisher:
        """Serve readers of events."""
        publisher = Publisher(self._counters)
        limits = ConnectionLimits(message=0, topic=MAX_TOPIC_BYTES)
        spec = ListenerSpec("events", "PUB", Null(), limits, self.counts.events)
        self._acceptors.append(Acceptor(listening, spec, publisher, self._events, self._counters))
        return publisher

    def serve_peers(
        self, listening: socket.socket, service: Service, config: Config, mechanism: Mechanism
    ) -> None:
        """Serve other kvds: those that ``mechanism`` lets in."""
        limits = ConnectionLimits(message=config.peer.max_message_bytes)
        spec = ListenerSpec("peer", "ROUTER", mechanism, limits, self.counts.peer)
        self._peers = Acceptor(listening, spec, service, self.shared, self._counters)
        self._peers.refusals = self.refusals
        self._acceptors.append(self._peers)

    def end_peers(self, revoked: Collection[bytes]) -> None:
        """End the connections of peers with these keys."""
        for channel in list(self._peers.open) if self._peers is not None else ():
            if channel.key in revoked:
                channel.end()

    async def run(self) -> None:
        """Serve until cancelled."""
        serving = asyncio.get_running_loop().create_task(self.poller.run())
        swept, judges_from = time.monotonic(), 0.0
        try:
            while not serving.done():
                await asyncio.wait([serving], timeout=SWEEP_SECONDS)
                late, swept = time.monotonic() - swept - SWEEP_SECONDS, time.monotonic()
                if late > STOPPED_SECONDS:  # what came meanwhile is to be read first
                    judges_from = swept + STOPPED_SECONDS
                if swept >= judges_from:
                    self._sweep()
            serving.result()
        finally:
            serving.cancel()

    def _sweep(self) -> None:
        """End the connections of those that are too slow."""
        for acceptor in self._acceptors:
            acceptor.sweep()
        for one in (self.shared.unsent, self._events.unsent):
            one.sweep()

    def close(self) -> None:
        """Send what is still to be sent, for a short time, and close all."""
        ends = time.monotonic() + FLUSH_SECONDS
        unsent = (self.shared.unsent, self._events.unsent)
        while any(one.waiting for one in unsent) and time.monotonic() < ends:
            for channel in [channel for one in unsent for channel in one.waiting]:
                channel.flush()
            time.sleep(_FLUSH_AGAIN_SECONDS)
        for acceptor in self._acceptors:
            acceptor.close()
        self.poller.close()
        for shared in (self.shared, self._events):
            shared.opener.shutdown(wait=False, cancel_futures=True)
