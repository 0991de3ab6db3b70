"""One ROUTER socket: takes frames, finds the handler, sends the answer. Nothing that arrives can end its loop."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvd.service.errors import LedgerError, RequestRefused
from kvd.wire.errors import Malformed, UnknownMessage, VersionMismatch, WireError
from kvd.wire.frame import Message, body, decode, encode, kind_of
from kvd.wire.reply import Refused, Reply

log = logging.getLogger(__name__)

MAX_TASKS = 4096
"""Most requests of one socket that wait for something at a time; further ones are refused."""
TURN_SECONDS = 0.002
"""How long messages are taken before other tasks get their turn: a flood must not starve the clocks."""

_KINDS_OF_JUNK = {Malformed: "malformed", VersionMismatch: "version", UnknownMessage: "unknown"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a message: its route on the socket, and the process behind it as the kernel names it.

    Where it does not, ``pid`` is 0 and ``uid`` -1. ``key`` is the public CURVE key in Z85 with which a peer proved who
    it is, empty where connections have none.
    """

    route: bytes
    pid: int = 0
    uid: int = -1
    key: bytes = b""


Handled = Message | None
Handler = Callable[[Caller, Any], Handled | Awaitable[Handled]]


class Router:
    """A bound ROUTER socket and its table of handlers, by type of message."""

    def __init__(self, name: str, socket: zmq.Socket[bytes], counters: Counter[str]) -> None:
        self.name = name
        self.handlers: Mapping[type[Any], Handler] = {}
        self._socket = socket
        self._counters = counters
        self._tasks: set[asyncio.Task[None]] = set()
        self._working: set[tuple[bytes, int]] = set()
        self._asked: dict[tuple[bytes, int], asyncio.Future[Message]] = {}
        self._ids = itertools.count(1)
        self._ended: asyncio.Future[None] | None = None
        self._looking = False  # nor is it to happen soon
        self._last: tuple[Message, msgspec.Raw] | None = None
        """What was sent last: it often goes to all clients of an engine, and is encoded once."""

    @property
    def busy(self) -> int:
        """Requests that wait for something now."""
        return len(self._tasks)

    async def run(self) -> None:
        """Take messages until cancelled, or until the socket is closed."""
        # A plain socket and its file descriptor: futures of zmq.asyncio would cost each message more than all else.
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, self._look)
        self._look()
        try:
            await self._ended
        finally:
            self._ended = None
            loop.remove_reader(descriptor)

    def _look(self) -> None:
        """Take what is there, for `TURN_SECONDS`; the descriptor tells of news only when nothing was left."""
        if self._ended is None:
            return
        self._looking = True
        ends = time.monotonic() + TURN_SECONDS
        while self._receive():
            if time.monotonic() >= ends:
                asyncio.get_running_loop().call_soon(self._look)
                return
        self._looking = False

    def _receive(self) -> bool:
        """Take one message; False where there is none."""
        # What handling it raises must not be taken for an empty socket: nothing would ever tell of the rest.
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                if self._ended is not None and not self._ended.done():
                    self._ended.set_result(None)
                return False
            self._counters["errors.socket"] += 1
            log.exception("%s socket: receiving failed; going on", self.name)
            return True
        try:
            self._take(frames)
        except Exception:  # one message of one client must not end the loop for all
            self._counters["errors.internal"] += 1
            log.exception("%s socket: a message could not be handled; going on", self.name)
        return True

    def send(self, route: bytes, message: Message, correlation: int = 0) -> None:
        """Send without waiting; a client that is away or too slow loses the message."""
        if self._last is None or self._last[0] is not message:
            self._last = message, body(message)
        try:
            self._socket.send_multipart([route, encode(self._last[1], correlation)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._counters["sent.dropped"] += 1
        if self._ended is not None and not self._looking:
            # Sending too may find out that there is something to receive, and the descriptor will not tell again.
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    async def ask(self, route: bytes, message: Message, seconds: float) -> Message:
        """Ask a client and wait for its answer. Raises `TimeoutError`."""
        key = (route, next(self._ids))
        self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self.send(route, message, key[1])
            return await asyncio.wait_for(self._asked[key], seconds)
        finally:
            del self._asked[key]

    async def finish(self, seconds: float) -> None:
        """Wait for the requests in flight, at most ``seconds``; cancel the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()

    def _take(self, frames: list[zmq.Frame]) -> None:
        caller = Caller(frames[0].bytes, *_process(frames[0]), _key(frames[0]))
        if len(frames) != 2:
            self._counters["received.frames"] += 1
            what = f"a message is one frame, this one has {len(frames) - 1}"
            self.send(
                caller.route, Refused(code=Malformed.code, message=what, hint="send [version, id, message]")
            )
            return
        try:
            message, correlation = decode(frames[1].bytes)
        except WireError as error:
            self._counters[f"received.{_KINDS_OF_JUNK.get(type(error), 'malformed')}"] += 1
            refused = Refused(
                code=error.code, message=error.message, hint="both sides should be of one version"
            )
            self._reply(caller, refused, error.correlation)
            return
        self._counters[f"received.{kind_of(message)}"] += 1
        if isinstance(message, Reply):
            asked = self._asked.get((caller.route, correlation))
            if asked is not None and not asked.done():
                asked.set_result(message)
            else:
                self._counters["received.unexpected"] += 1
            return
        self._dispatch(caller, message, correlation)

    def _dispatch(self, caller: Caller, message: Message, correlation: int) -> None:
        if correlation and (caller.route, correlation) in self._working:
            self._counters["received.repeated"] += 1  # one answer is on its way already, and serves for both
            return
        handler = self.handlers.get(type(message))
        if handler is None:
            self._counters["received.not_here"] += 1
            here = ", ".join(sorted(str(t.__struct_config__.tag) for t in self.handlers))
            what = f"{kind_of(message)} is not taken on the {self.name} socket"
            self._reply(
                caller, Refused(code="KVD-NOT-HERE", message=what, hint=f"taken here: {here}"), correlation
            )
            return
        try:
            answer = handler(caller, message)
        except Exception as error:  # noqa: BLE001 (it is turned into an answer and logged)
            self._reply(caller, self._refusal(error, message), correlation)
            return
        if not inspect.isawaitable(answer):
            self._reply(caller, answer, correlation)
        elif len(self._tasks) >= MAX_TASKS:
            if inspect.iscoroutine(answer):
                answer.close()
            self._counters["refused.busy"] += 1
            what = f"{MAX_TASKS} requests are waiting already"
            self._reply(caller, Refused(code="KVD-BUSY", message=what, hint="try again"), correlation)
        else:
            task = asyncio.ensure_future(self._wait(caller, message, answer, correlation))
            self._working.add((caller.route, correlation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wait(
        self, caller: Caller, message: Message, work: Awaitable[Handled], correlation: int
    ) -> None:
        asked = (caller.route, correlation)
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001 (it is turned into an answer and logged)
            answer = self._refusal(error, message)
        finally:
            self._working.discard(asked)
        self._reply(caller, answer, correlation)

    def _refusal(self, error: Exception, message: Message) -> Refused:
        if isinstance(error, RequestRefused):
            self._counters[f"refused.{error.code}"] += 1
            return error.refused
        self._counters["errors.internal"] += 1
        if isinstance(error, LedgerError):
            log.error("%s", error.message)
            return Refused(
                code="KVD-LEDGER", message=error.message, hint="see the disk of kvd's state directory"
            )
        log.error("handling %s failed", kind_of(message), exc_info=error)
        return Refused(
            code="KVD-INTERNAL",
            message=f"kvd failed at {kind_of(message)}: {type(error).__name__}: {error}",
            hint="see the log of kvd (journalctl -u kvd)",
        )

    def _reply(self, caller: Caller, answer: Handled, correlation: int) -> None:
        if answer is None:
            return
        try:
            self.send(caller.route, answer, correlation)
        except (OverflowError, ValueError, TypeError):
            # A correlation id that msgpack cannot carry back: the sender made it up.
            self._counters["received.malformed"] += 1


def _process(frame: zmq.Frame) -> tuple[int, int]:
    """The pid and uid behind a frame."""
    # libzmq appends the kernel's credentials of an ipc peer to its address: "host:uid:gid:pid".
    try:
        parts = str(frame.get("Peer-Address")).split(":")
    except zmq.ZMQError:
        return 0, -1
    if len(parts) != 4 or not (parts[1].isdigit() and parts[3].isdigit()):
        return 0, -1
    return int(parts[3]), int(parts[1])


def _key(frame: zmq.Frame) -> bytes:
    """The public key that the authenticator found behind a frame."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""
