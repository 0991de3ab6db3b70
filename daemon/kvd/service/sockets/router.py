"""One socket's requests: takes messages, finds the handler, sends the answer. Nothing that arrives can end its loop."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvd.service.errors import RequestRefused, unreadable
from kvd.service.fairness.budget import Budget
from kvd.service.sockets.channel import Channel, ChannelEnd
from kvd.service.sockets.fair_lines import ASKER
from kvd.service.sockets.limits import UNSENT_BYTES
from kvd.service.sockets.reservations import Hold
from kvd.service.sockets.shares import shares_of_waiting
from kvd.wire.codes import counted_as
from kvd.wire.errors import Malformed, TooLarge, UnknownMessage, VersionMismatch, WireError
from kvd.wire.frame import Message, body, decode, encode, kind_of
from kvd.wire.limits import FOR_CLIENTS_AND_LINKS, MOST_FOR_DAEMON
from kvd.wire.reply import Refused, Reply, refusal
from kvd.zmtp.events import Received, Subscribed, Unsubscribed

log = logging.getLogger(__name__)

_KINDS_OF_JUNK = {
    Malformed: "malformed",
    TooLarge: "too_large",
    VersionMismatch: "version",
    UnknownMessage: "unknown",
}
LAST_SECONDS = 1.0
"""How long the message that was sent last is kept encoded, which may have 60 MiB."""
_NO_BODY = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a message: its route on the socket, and what is certain about who speaks.

    ``pid`` and ``uid`` are those of the process that connected, as the kernel names it: 0 and -1 where it does not.
    ``key`` is the peer's public CURVE key in Z85, which it has proved to hold; empty where there is none. ``operator``:
    it is on another host whose operators may see all here.
    """

    route: bytes
    pid: int = 0
    uid: int = -1
    key: bytes = b""
    operator: bool = False


@dataclass(frozen=True, slots=True)
class ClientLine:
    """One client's connection: what we asked it, by correlation id, and the ids of its requests that wait."""

    channel: Channel
    caller: Caller
    asked: dict[int, asyncio.Future[Message]] = field(default_factory=dict)
    working: set[int] = field(default_factory=set)


Handled = Message | None
Handler = Callable[[Caller, Any], Handled | Awaitable[Handled]]


class Router:
    """The requests of one socket and their table of handlers, by type of message.

    At most ``queue`` buffers wait for one client, one or two a message.
    """

    def __init__(self, name: str, counters: Counter[str], queue: int) -> None:
        self.name = name
        self._queue = queue
        self.handlers: Mapping[type[Any], Handler] = {}
        self._counters = counters
        self._lines: dict[bytes, ClientLine] = {}
        self._waiting = Budget("requests", "bytes")
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = itertools.count(1)
        self._last: tuple[Message, msgspec.Raw, float] | None = None
        """What was sent last, and when first: it often goes to all clients of an engine, and is encoded once.

        A timer runs while there is one: one for each message would keep all messages of its time.
        """

    @property
    def busy(self) -> int:
        """Requests that wait for something now."""
        return len(self._tasks)

    def send(self, route: bytes, message: Message, correlation: int = 0) -> None:
        """Send without waiting; a client that is away loses the message, one that is too slow its connection."""
        line = self._lines.get(route)
        if line is None:
            return
        if self._last is None or self._last[0] is not message:
            if self._last is None:
                asyncio.get_running_loop().call_later(LAST_SECONDS, self._forget)
            self._last = message, body(message), time.monotonic()
        if line.channel.unsent > UNSENT_BYTES or line.channel.buffers > self._queue:
            line.channel.give_up()
            return
        line.channel.send(encode(_NO_BODY, correlation), self._last[1])

    def _forget(self) -> None:
        if self._last is None:
            return
        if (left := self._last[2] + LAST_SECONDS - time.monotonic()) > 0:
            asyncio.get_running_loop().call_later(left, self._forget)
        else:
            self._last = None

    def unsent(self, route: bytes) -> int:
        """Bytes that a client has not read yet; none where it is away."""
        line = self._lines.get(route)
        return line.channel.unsent if line is not None else 0

    async def ask(self, route: bytes, message: Message, seconds: float) -> Message:
        """Ask a client and wait for its answer. Raises `TimeoutError`, at once where its connection has ended."""
        line = self._lines.get(route)
        if line is None:
            raise TimeoutError("the client is not connected any more")
        correlation = next(self._ids)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        line.asked[correlation] = answer
        try:
            self.send(route, message, correlation)
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            del line.asked[correlation]

    async def finish(self, seconds: float) -> None:
        """Wait for the requests in flight, at most ``seconds``; cancel the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()

    # --- what the socket tells ---

    def joined(self, channel: Channel) -> None:
        """A client is there."""
        caller = Caller(channel.route, channel.pid, channel.uid, channel.key)
        self._lines[channel.route] = ClientLine(channel, caller)

    def left(self, channel: Channel, cause: ChannelEnd) -> None:
        """A client is there no more: nobody waits for its answers."""
        line = self._lines.pop(channel.route)
        if cause == "unread":
            self._counters["sent.dropped"] += 1
            log.info("%s socket: a client does not read what is sent to it (pid %d)", self.name, channel.pid)
        for answer in line.asked.values():
            if not answer.done():
                answer.set_exception(TimeoutError("the client's connection ended"))

    def subscribed(self, channel: Channel, event: Subscribed | Unsubscribed) -> None:
        """Nobody subscribes here."""

    def received(self, channel: Channel, message: Received, hold: Hold | None) -> None:
        """Take a message. Whatever it causes ends nothing but itself."""
        waits, asker = None, ASKER.set(channel.path[0])
        try:
            waits = self._take(self._lines[channel.route], message)
        except Exception:  # one message of one client must not end the loop for all
            self._counters["errors.internal"] += 1
            log.exception("%s socket: a message could not be handled; going on", self.name)
        finally:
            ASKER.reset(asker)
        if hold is None:
            return
        if waits is None:
            hold.release()
        else:
            waits.add_done_callback(lambda _: hold.release())

    def _take(self, line: ClientLine, received: Received) -> asyncio.Task[None] | None:
        """Handle a message; where it waits for something, the task that does, and keeps its memory."""
        caller = line.caller
        if received.frames != 1:
            self._counters["received.frames"] += 1
            what = f"a message is one frame, this one has {received.frames}"
            self.send(
                caller.route, refusal(code=Malformed.code, message=what, hint="send [version, id, message]")
            )
            return None
        try:
            message, correlation = decode(received.body, MOST_FOR_DAEMON, FOR_CLIENTS_AND_LINKS)
        except WireError as error:
            self._counters[f"received.{_KINDS_OF_JUNK.get(type(error), 'malformed')}"] += 1
            self._reply(caller, unreadable(error), error.correlation)
            return None
        self._counters[f"received.{kind_of(message)}"] += 1
        if isinstance(message, Reply):
            self._answered(line, message, correlation)
            return None
        if correlation and correlation in line.working:
            self._counters["received.repeated"] += 1  # one answer is on its way already, and serves for both
            return None
        answer = self._handle(caller, message)
        if not inspect.isawaitable(answer):
            self._reply(caller, answer, correlation)
            return None
        shares = shares_of_waiting(caller.route, line.channel.path, kind_of(message))
        if full := self._waiting.full(shares, received.size):
            if inspect.iscoroutine(answer):
                answer.close()
            self._counters["refused.busy"] += 1
            self._reply(caller, refusal(code="KVD-BUSY", message=full, hint="try again"), correlation)
            return None
        self._waiting.take(shares, received.size)
        line.working.add(correlation)
        task = asyncio.ensure_future(self._wait(caller, message, answer, correlation))
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._waiting.give_back(shares, received.size)
            line.working.discard(correlation)

        task.add_done_callback(over)
        return task

    def _answered(self, line: ClientLine, message: Reply, correlation: int) -> None:
        asked = line.asked.get(correlation)
        if asked is not None and not asked.done():
            asked.set_result(message)
        else:
            self._counters["received.unexpected"] += 1

    def _handle(self, caller: Caller, message: Message) -> Handled | Awaitable[Handled]:
        handler = self.handlers.get(type(message))
        if handler is None:
            self._counters["received.not_here"] += 1
            here = ", ".join(sorted(str(t.__struct_config__.tag) for t in self.handlers))
            what = f"{kind_of(message)} is not taken on the {self.name} socket"
            return refusal(code="KVD-NOT-HERE", message=what, hint=f"taken here: {here}")
        try:
            return handler(caller, message)
        except Exception as error:  # noqa: BLE001 (it is turned into an answer and logged)
            return self._refusal(error, message)

    async def _wait(
        self, caller: Caller, message: Message, work: Awaitable[Handled], correlation: int
    ) -> None:
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001 (it is turned into an answer and logged)
            answer = self._refusal(error, message)
        self._reply(caller, answer, correlation)

    def _refusal(self, error: Exception, message: Message) -> Refused:
        if isinstance(error, RequestRefused):
            self._counters[f"refused.{counted_as(error.code)}"] += 1
            return error.refused
        self._counters["errors.internal"] += 1
        log.error("handling %s failed", kind_of(message), exc_info=error)
        return refusal(
            "KVD-INTERNAL",
            f"kvd failed at {kind_of(message)}: {type(error).__name__}: {error}",
            hint="see the log of kvd (journalctl -u kvd)",
        )

    def _reply(self, caller: Caller, answer: Handled, correlation: int) -> None:
        if answer is None:
            return
        try:
            self.send(caller.route, answer, correlation)
        except (OverflowError, ValueError, TypeError) as error:  # kvd's own fault: the asker hears of it
            self.send(caller.route, self._refusal(error, answer), correlation)
