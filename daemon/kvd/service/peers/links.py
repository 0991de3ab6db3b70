"""Links to other kvds: one DEALER for each endpoint, pinged, with a state that says whether it can be relied on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, cast

import msgspec
import zmq
import zmq.asyncio

from kvd.addresses import join_address
from kvd.service.config import PeerSettings
from kvd.service.errors import PeerAway
from kvd.service.sockets.curve import Keys
from kvd.service.sockets.events import Events
from kvd.wire.errors import WireError
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import EngineEnded, Ping, Pong
from kvd.wire.identity import Endpoint
from kvd.wire.query import PeerRow

log = logging.getLogger(__name__)

MAX_LINKS = 2048
IDLE_SECONDS = 120.0
"""A link that nothing uses is closed after this long."""
LOOK_AGAIN_SECONDS = 0.25
"""Something that could not be sent is tried again when the socket says that it can be, and after this long."""
PAUSE_SECONDS = 0.02
"""Shortest pause between two pings."""
DOWN_PING_SECONDS = 0.25


class Listener(Protocol):
    """Who has to be told of what links see; called on the loop, must not wait."""

    def using(self, endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
        """The engines (id, generation) behind an endpoint that local ones use."""

    def link_up(self, endpoint: Endpoint) -> None:
        """The peer answers (again)."""

    def link_down(self, endpoint: Endpoint, reason: str) -> None:
        """The peer does not answer."""

    def peer_engine_gone(self, endpoint: Endpoint, engine_id: str, generation: str, reason: str) -> None:
        """The peer says that this generation ended."""

    def peer_engines_ready(self, endpoint: Endpoint, ready: tuple[tuple[str, str], ...]) -> None:
        """The peer has these engines (id, generation)."""


class PeerLink:
    """The way to one other kvd, which is pinged from now on; ``me`` is a `Ping` without its ``using``."""

    def __init__(
        self,
        endpoint: Endpoint,
        socket: zmq.asyncio.Socket,
        settings: PeerSettings,
        events: Events,
        listener: Listener,
        me: Ping,
        key: bytes = b"",
    ) -> None:
        self.endpoint = endpoint
        self.key = key
        """The peer's, that the connection was made for; empty where peers have none."""
        self.state: Literal["connecting", "up", "down"] = "connecting"
        self.since = time.time()
        self.rtt = 0.0
        self.kvd_id = ""
        self.used = time.monotonic()
        self._settings = settings
        self._socket = socket
        self._events = events
        self._listener = listener
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._receive()), loop.create_task(self._ping(me))]

    async def ask(self, message: Message, seconds: float) -> Message:
        """Ask the peer; a `Refused` is returned like any answer.

        Raises `PeerAway` where none came in time, or as soon as the peer is taken to be down.
        """
        self.used = time.monotonic()
        if self.state == "down":
            raise PeerAway(f"the kvd at {self.endpoint} is down since {time.time() - self.since:.1f} s")
        return await self._ask(message, seconds)

    def end(self, reason: str) -> None:
        """Whoever waits for an answer waits no longer, and nothing is taken from the peer; `close` is still to come."""
        for task in self._tasks:
            task.cancel()
        if self.state != "down":
            self._change("down", reason)

    async def close(self) -> None:
        """Stop, and close the socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)

    def row(self) -> PeerRow:
        """The link as operators see it."""
        return PeerRow(
            endpoint=self.endpoint, kvd_id=self.kvd_id, state=self.state, rtt=self.rtt, since=self.since
        )

    async def _ask(self, message: Message, seconds: float) -> Message:
        deadline = time.monotonic() + seconds
        correlation = next(self._ids)
        frames = [encode(message, correlation)]
        answer = self._asked[correlation] = asyncio.get_running_loop().create_future()
        try:
            while not _send_now(self._socket, frames):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerAway(f"no connection to a kvd at {self.endpoint} within {seconds:g} s")
                if answer.done():
                    break  # the link went down meanwhile
                await _sendable(self._socket, min(left, LOOK_AGAIN_SECONDS))
            try:
                return await asyncio.wait_for(answer, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise PeerAway(f"the kvd at {self.endpoint} did not answer within {seconds:g} s") from None
        finally:
            del self._asked[correlation]

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message, correlation = decode(frames[-1])
            except WireError as error:
                self._events.counters["peers.unreadable"] += 1
                log.warning("the kvd at %s sent what cannot be read: %s", self.endpoint, error.message)
                continue
            if isinstance(message, EngineEnded):
                self._listener.peer_engine_gone(
                    self.endpoint, message.engine_id, message.generation, message.reason
                )
            elif (asked := self._asked.get(correlation)) and not asked.done():
                asked.set_result(message)
            else:
                self._events.counters["peers.late"] += 1

    async def _ping(self, me: Ping) -> None:
        heard = time.monotonic()
        while True:
            began = time.monotonic()
            message = msgspec.structs.replace(me, using=self._listener.using(self.endpoint))
            try:
                answer = await self._ask(message, self._settings.ping_seconds)
            except PeerAway as away:
                if self.state != "down" and time.monotonic() - heard > self._settings.down_seconds:
                    self._change("down", away.message)
            else:
                if isinstance(answer, Pong):
                    heard, self.rtt, self.kvd_id = time.monotonic(), time.monotonic() - began, answer.kvd_id
                    if self.state != "up":
                        self._change("up", "")
                    for engine_id, generation in answer.gone:
                        reason = "its kvd says that this generation ended"
                        self._listener.peer_engine_gone(self.endpoint, engine_id, generation, reason)
                    self._listener.peer_engines_ready(self.endpoint, answer.ready)
            pause = DOWN_PING_SECONDS if self.state == "down" else self._settings.ping_seconds
            await asyncio.sleep(max(PAUSE_SECONDS, pause - (time.monotonic() - began)))

    def _change(self, state: Literal["up", "down"], reason: str) -> None:
        self.state, self.since = state, time.time()
        self._events.emit(f"peer.{state}", str(self.endpoint), kvd_id=self.kvd_id, reason=reason)
        if state == "up":
            self._listener.link_up(self.endpoint)
        else:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(PeerAway(f"the kvd at {self.endpoint} is down: {reason}"))
            self._listener.link_down(self.endpoint, reason)


def _send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send without waiting; False where the queue is full or nobody is there."""
    # With NOBLOCK the future that zmq gives is done already.
    sent = cast("asyncio.Future[Any]", socket.send_multipart(frames, zmq.NOBLOCK))
    return sent.done() and sent.exception() is None


async def _sendable(socket: zmq.asyncio.Socket, seconds: float) -> None:
    """Wait for a connection, or for room on it."""
    wait = cast("Callable[[int, int], Awaitable[int]]", socket.poll)  # the stubs know only its first argument
    await wait(max(1, int(1000 * seconds)), zmq.POLLOUT)


class PeerLinks:
    """The links by endpoint; made at first use, closed when nothing needs them."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        settings: PeerSettings,
        keys: Keys | None,
        events: Events,
        me: Ping,
    ) -> None:
        self.links: dict[Endpoint, PeerLink] = {}
        self.listener: Listener
        self._context = context
        self._settings = settings
        self._keys = keys
        self._events = events
        self._me = me
        self.kept: set[Endpoint] = set()
        """Endpoints whose links stand whether they are used or not."""

    def get(self, endpoint: Endpoint) -> PeerLink:
        """The link to an endpoint. Raises `PeerAway` where none can be made, naming the endpoint."""
        link = self.links.get(endpoint)
        if link is None:
            if len(self.links) >= MAX_LINKS:
                raise PeerAway(
                    f"{MAX_LINKS} other kvds are linked already; none can be added for {endpoint.host}"
                )
            key = self._expected(endpoint)
            link = self.links[endpoint] = PeerLink(
                endpoint,
                self._connect(endpoint, key),
                self._settings,
                self._events,
                self.listener,
                self._me,
                key,
            )
        return link

    async def keys_changed(self) -> None:
        """End the links to hosts whose keys are not trusted any more, or are others now.

        What needs them makes them anew. The engines of a host that has lost its trust are gone, those of one that has
        another key are away.
        """
        if self._keys is None:
            return
        ended = []
        for endpoint, link in list(self.links.items()):
            expected = self._keys.of(endpoint.host, endpoint.port)
            if link.key == expected and expected in self._keys.authorized:
                continue
            reason = (
                "its host has another key now" if expected else "the key of its host is not trusted any more"
            )
            del self.links[endpoint]
            ended.append(link)
            link.end(reason)
            if not expected:
                for engine_id, generation in self.listener.using(endpoint):
                    self.listener.peer_engine_gone(endpoint, engine_id, generation, reason)
        for link in ended:
            await link.close()

    async def prune(self) -> None:
        """Close, every few seconds until cancelled, the links that nothing uses."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            before = time.monotonic() - IDLE_SECONDS
            for endpoint, link in list(self.links.items()):
                if link.used < before and endpoint not in self.kept and not self.listener.using(endpoint):
                    del self.links[endpoint]
                    await link.close()

    async def close(self) -> None:
        """Close all."""
        for link in self.links.values():
            with contextlib.suppress(zmq.ZMQError):
                await link.close()
        self.links.clear()

    def _expected(self, endpoint: Endpoint) -> bytes:
        """The key of the host of an endpoint. Raises `PeerAway` where none is trusted."""
        if self._keys is None:
            return b""
        if not (key := self._keys.of(endpoint.host, endpoint.port)):
            raise PeerAway(
                f"no key is trusted for the kvd at {endpoint}: `kvctl keys trust KEY {endpoint}` with what"
                " `kvctl keys show` prints there"
            )
        return key

    def _connect(self, endpoint: Endpoint, key: bytes) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        settings = self._settings
        options = {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,  # nothing is queued for a peer that is away: it would come late and out of date
            zmq.SNDHWM: settings.queue,
            zmq.RCVHWM: settings.queue,
            zmq.MAXMSGSIZE: settings.max_message_bytes,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 500,
            zmq.HEARTBEAT_IVL: int(settings.ping_seconds * 1000),
            zmq.HEARTBEAT_TIMEOUT: int(settings.down_seconds * 1000),
            zmq.CONNECT_TIMEOUT: 2000,
            zmq.IPV6: int(":" in endpoint.host),
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        if self._keys is not None:
            socket.curve_publickey = self._keys.public
            socket.curve_secretkey = self._keys.secret
            socket.curve_serverkey = key
        try:
            socket.connect(f"tcp://{join_address(endpoint.host, endpoint.port)}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise PeerAway(
                f"cannot connect to {endpoint.host!r} port {endpoint.port}: {error.strerror}"
            ) from None
        return socket
