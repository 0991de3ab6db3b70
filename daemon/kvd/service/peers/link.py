"""A link to another kvd: one connection, made anew whenever it is lost, pinged, with a state that can be relied on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import msgspec

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.config import PeerSettings
from kvd.service.errors import PeerAway
from kvd.service.peers import troubles
from kvd.service.peers.listener import Listener
from kvd.service.peers.silence import Silence, Silences
from kvd.service.peers.troubles import NO_KEYS, LinkKeys, Trouble
from kvd.service.sockets.channel import Channel, ChannelEnd, ChannelOwner
from kvd.service.sockets.dialling import DialKind
from kvd.service.sockets.events import Events
from kvd.service.sockets.limits import HANDSHAKE_SECONDS, UNSENT_BYTES
from kvd.service.sockets.reservations import Hold
from kvd.wire.errors import WireError
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import EngineEnded, EnginesChanged, Ping, Pong
from kvd.wire.identity import Endpoint
from kvd.wire.limits import FOR_CLIENTS, MOST_FOR_DAEMON
from kvd.wire.query import PeerRow
from kvd.zmtp.events import Handshaken, Received, Subscribed, Unsubscribed

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.02
"""Shortest pause between two pings."""
DOWN_PING_SECONDS = 0.25
RECONNECT_SECONDS = (0.05, 0.5)
"""First and longest pause before a connection is made again; it doubles in between."""
NEVER_UP_RECONNECT_SECONDS = 2.0
"""The longest pause while nobody ever answered there."""
QUIET_SECONDS = 5.0
"""A link that nobody asked for so long, and over which no engine is used, is quiet: it is pinged now and then."""
MOST_TOLD = 8
"""Troubles of one peer that the log is told of before it is up again."""

Dial = Callable[[ChannelOwner, DialKind], Awaitable[Channel]]


class PeerLink:
    """The way to one other kvd, which is pinged from now on; ``me`` is a `Ping` without its ``using``.

    ``dial`` makes a connection, for the peer that has the key in ``keys``. ``silences`` is what others are told of
    those that do not answer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dial: Dial,
        settings: PeerSettings,
        events: Events,
        listener: Listener,
        me: Ping,
        keys: LinkKeys = NO_KEYS,
        silences: Silences | None = None,
    ) -> None:
        self.endpoint, self.keys = endpoint, keys
        self.state: Literal["connecting", "up", "down"] = "connecting"
        self.since = time.time()
        self.rtt = 0.0
        self.kvd_id = ""
        self.generation = ""
        self.used = time.monotonic()
        self.changes, self.engines = 0, 0  # as the last `Pong` has them
        self._silences = silences or Silences()
        self._silence = Silence()
        self._hurry = asyncio.Event()
        self._dial, self._settings, self._events, self._listener = dial, settings, events, listener
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._sent: set[int] = set()  # of these the ones that went out on this connection
        self._channel: Channel | None = None
        self._connected_at = 0.0
        self._trouble = Trouble()  # why there is no connection
        self._told: set[Trouble] = set()  # what the log was told of, since it was up
        self._down = ""  # why it is down
        loop = asyncio.get_running_loop()
        self._connected: asyncio.Future[None] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._tasks = BackgroundTasks()
        for work in (self._stay_connected, partial(self._ping, me)):
            self._tasks.begin(self._for_ever(work))

    @property
    def failed(self) -> bool:
        """There was a connection that could not be made, or was lost."""
        return bool(self._trouble.reason)

    @property
    def connected(self) -> bool:
        """Whether there is a connection on which messages may be sent."""
        return self._channel is not None

    async def ask(self, message: Message, seconds: float) -> Message:
        """Ask the peer; a `Refused` is returned like any answer.

        Raises `PeerAway` where none came in time, and at once where the connection is lost or the peer is down.
        """
        self.used = time.monotonic()
        self._hurry.set()
        if self.state == "down":
            since = f"the kvd at {self.endpoint} is down since {time.time() - self.since:.1f} s"
            raise PeerAway(f"{since}: {self._down}" if self._down else since)
        return await self._ask(message, seconds)

    def suspect(self, since: float) -> bool:
        """Others have had no answer since then: ping it now. False where that is no news."""
        if self.state != "up" or self._silence.outweighs(since, self._settings.ping_seconds):
            return False
        self._silence.hearsay = min(self._silence.hearsay, since)
        self._hurry.set()
        return True

    def end(self, reason: str = "") -> None:
        """Close the connection; who waits for an answer fails. With a reason a peer that once answered is down now."""
        why = reason or "it is not used any more"
        self._fail(list(self._asked), f"the link to the kvd at {self.endpoint} was ended: {why}")
        self._tasks.cancel()
        if self._channel is not None:
            self._channel.end()
        if reason and self.kvd_id and self.state != "down":
            self._change("down", reason)

    async def close(self) -> None:
        """End it, also where that was done before, and return when nothing of it runs any more."""
        self.end()
        await self._tasks.close()

    def row(self) -> PeerRow:
        """The link as operators see it."""
        trouble = Trouble(self._down) if self._channel is not None else self._trouble
        return PeerRow(
            endpoint=self.endpoint,
            kvd_id=self.kvd_id,
            state=self.state,
            rtt=self.rtt,
            since=self.since,
            reason=trouble.reason if self.state != "up" else "",
            hint=trouble.hint if self.state != "up" else "",
        )

    # --- what the connection tells ---

    def handshaken(self, channel: Channel, _peer: Handshaken) -> None:
        """Messages may be sent."""
        self._channel, self._connected_at = channel, time.monotonic()
        if not self._connected.done():
            self._connected.set_result(None)

    def received(self, _channel: Channel, message: Received, hold: Hold | None) -> None:
        """Take an answer, or what the peer says unasked."""
        try:
            self._take(message)
        finally:
            if hold is not None:
                hold.release()

    def subscribed(self, channel: Channel, event: Subscribed | Unsubscribed) -> None:
        """Nobody subscribes here."""

    def ended(self, _channel: Channel, cause: ChannelEnd) -> None:
        """Who waits for an answer on it fails now; another connection will be made."""
        self._trouble = troubles.ended(self.endpoint, cause, self.keys, shaken=self._channel is not None)
        if self._trouble.hint:
            self._warn(self._trouble)
        self._fail(
            list(self._sent), f"the connection to the kvd at {self.endpoint} was lost: {self._trouble.reason}"
        )
        self._sent.clear()
        if self._channel is not None:
            self._channel = None
            self._connected = asyncio.get_running_loop().create_future()
        if not self._lost.done():
            self._lost.set_result(None)
        self._hurry.set()

    def _warn(self, trouble: Trouble) -> None:
        """Tell the log, once until the peer is up again."""
        if trouble not in self._told and len(self._told) < MOST_TOLD:
            log.warning("the kvd at %s: %s", self.endpoint, trouble)
            self._told.add(trouble)

    async def _for_ever(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what a link does until it ends. An error that nobody thought of ends it for no longer than a pause."""
        while True:
            try:
                await work()
            except Exception:
                # Whatever it may be, an answer that no other kvd gives included: a link without its two tasks would
                # stay "up" or "down" for ever, and each question to it would wait for its deadline. Both begin from
                # nothing, a new connection and a new ping, so what was left half done is of no consequence.
                self._events.counters["errors.internal"] += 1
                log.exception("the link to the kvd at %s failed and starts again", self.endpoint)
            await asyncio.sleep(RECONNECT_SECONDS[1])

    # --- the connection ---

    async def _stay_connected(self) -> None:
        pause = RECONNECT_SECONDS[0]
        while True:
            self._lost = asyncio.get_running_loop().create_future()
            try:
                channel = await self._dial(
                    self, "known" if self.kvd_id else "again" if self.failed else "first"
                )
            except OSError as error:  # TimeoutError is one
                self._trouble = troubles.not_dialled(self.endpoint, error)
            else:
                try:
                    await asyncio.wait(
                        [self._lost, self._connected],
                        timeout=HANDSHAKE_SECONDS,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if self._channel is None:
                        channel.end("slow")
                    else:
                        pause = RECONNECT_SECONDS[0]
                    await self._lost
                finally:
                    channel.end()
            await asyncio.sleep(pause)
            pause = min(pause * 2, RECONNECT_SECONDS[1] if self.kvd_id else NEVER_UP_RECONNECT_SECONDS)

    async def _ask(self, message: Message, seconds: float) -> Message:
        deadline = time.monotonic() + seconds
        correlation = next(self._ids)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[correlation] = answer
        try:
            while (channel := self._usable()) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerAway(self._no_connection(seconds))
                either: list[asyncio.Future[Any]] = [answer, self._connected]
                await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    break  # the link went down meanwhile
            if channel is not None:
                self._sent.add(correlation)
                channel.send(b"", encode(message, correlation))
            await asyncio.wait([answer], timeout=max(0.0, deadline - time.monotonic()))
            if not answer.done():
                raise PeerAway(f"the kvd at {self.endpoint} did not answer within {seconds:g} s")
            return answer.result()
        finally:
            self._sent.discard(correlation)
            del self._asked[correlation]
            # Its exception has this frame: a circle. Thousands of them would be left to the collector.
            del answer

    def _usable(self) -> Channel | None:
        """The connection; one on which too much waits already is ended."""
        channel = self._channel
        if channel is not None and (channel.unsent > UNSENT_BYTES or channel.buffers > self._settings.queue):
            channel.give_up()
        return self._channel

    def _take(self, received: Received) -> None:
        try:
            message, correlation = decode(received.body, MOST_FOR_DAEMON, FOR_CLIENTS)
        except WireError as error:
            self._events.counters["peers.unreadable"] += 1
            trouble = troubles.unreadable(error)
            self._warn(trouble)
            if (waits := self._asked.get(error.correlation)) and not waits.done():
                waits.set_exception(PeerAway(f"the kvd at {self.endpoint} {trouble.reason}"))
            return
        if isinstance(message, EngineEnded):
            self._listener.peer_engine_gone(
                self.endpoint, message.engine_id, message.generation, message.reason
            )
        elif isinstance(message, EnginesChanged):
            self._on_engines(message)
            if self._listener.known_ids(self.endpoint):
                self._hurry.set()  # the answer to a ping names those that are known and back
        elif (asked := self._asked.get(correlation)) and not asked.done():
            asked.set_result(message)
        else:
            self._events.counters["peers.late"] += 1

    # --- whether the peer answers ---

    async def _ping(self, me: Ping) -> None:
        silence = self._silence = Silence()
        while True:
            if self._channel is None:
                await self._wait_for_connection(silence.since)
                continue
            began = time.monotonic()
            self._hurry.clear()
            using, known = self._listener.using(self.endpoint), self._listener.known_ids(self.endpoint)
            message = msgspec.structs.replace(me, using=using, known=known, silent=self._silences.told())
            try:
                answer = await self._ask(message, self._settings.ping_seconds)
            except PeerAway as away:
                if silence.seconds > self._settings.down_seconds / 2:
                    self._silences.note(self.generation, silence.since)
                if silence.seconds > self._settings.down_seconds:
                    self._does_not_answer(away.message)
            else:
                if isinstance(answer, Pong):
                    silence.end()
                    self._on_pong(answer, silence.last_heard - began)
            pause = DOWN_PING_SECONDS if self.state == "down" else self._settings.ping_seconds
            await asyncio.sleep(max(PAUSE_SECONDS, pause - (time.monotonic() - began)))
            if await self._left_alone(silence.last_heard >= began):
                silence.asked = time.monotonic()

    async def _left_alone(self, answered: bool) -> bool:
        """Whether it was: nobody needs this link now. Returns as soon as somebody does, or its connection is lost."""
        pause = self._silences.pause() - self._settings.ping_seconds
        recently = time.monotonic() - self.used < QUIET_SECONDS
        if (
            recently
            or not answered
            or pause <= 0
            or self._channel is None
            or self._listener.using(self.endpoint)
        ):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._hurry.wait()
        return True

    def _does_not_answer(self, why: str) -> None:
        if self.state != "down":
            self._change("down", why)
        if self._channel is not None and time.monotonic() - self._connected_at > self._settings.down_seconds:
            self._channel.end("slow")  # its other end may be gone without a word

    async def _wait_for_connection(self, silent_since: float) -> None:
        """Return when there is one; the peer is down when there is none for too long."""
        if self.state != "down":
            left = silent_since + self._settings.down_seconds - time.monotonic()
            await asyncio.wait([self._connected], timeout=max(0.0, left))
            if not self._connected.done() and time.monotonic() >= silent_since + self._settings.down_seconds:
                self._change("down", self._no_connection(self._settings.down_seconds))
        else:
            await asyncio.wait([self._connected])

    def _on_pong(self, answer: Pong, seconds: float) -> None:
        if self.generation != answer.kvd_generation:
            self.changes = 0
        self.rtt, self.kvd_id, self.generation = seconds, answer.kvd_id, answer.kvd_generation
        self._on_engines(answer)
        self._silences.end(answer.kvd_generation)
        self._silences.hear(answer.silent)
        if self.state != "up":
            self._change("up", "")
        for engine_id, generation in answer.gone:
            reason = "its kvd says that this generation ended"
            self._listener.peer_engine_gone(self.endpoint, engine_id, generation, reason)
        self._listener.peer_engines_ready(self.endpoint, answer.ready)
        self._listener.peer_engines_draining(self.endpoint, answer.draining)

    def _on_engines(self, told: Pong | EnginesChanged) -> None:
        if told.changes != self.changes:
            self.changes, self.engines = told.changes, told.up
            self._listener.engines_changed(self.endpoint)

    def _no_connection(self, seconds: float) -> str:
        why = f": {self._trouble.reason}" if self.failed else ""
        return f"no connection to a kvd at {self.endpoint} within {seconds:g} s{why}"

    def _change(self, state: Literal["up", "down"], reason: str) -> None:
        self.state, self.since, self._down = state, time.time(), reason
        if state == "up":
            self._told.clear()
        hint = self._trouble.hint if state == "down" and self._channel is None else ""
        told = str(Trouble(reason, hint))
        self._events.emit(f"peer.{state}", str(self.endpoint), kvd_id=self.kvd_id, reason=told)
        if state == "up":
            self._listener.link_up(self.endpoint)
        else:
            self._fail(list(self._asked), f"the kvd at {self.endpoint} is down: {reason}")
            self._listener.link_down(self.endpoint, reason)

    def _fail(self, correlations: list[int], why: str) -> None:
        for correlation in correlations:
            if not self._asked[correlation].done():
                self._asked[correlation].set_exception(PeerAway(why))
