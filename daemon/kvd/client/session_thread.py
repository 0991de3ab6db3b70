"""The thread's side of a session: the socket, the clocks, and all that waits for an answer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvd.client.errors import ClientError, RefusedByDaemon, TimedOut, Unreachable
from kvd.wire.checksum import GetSums
from kvd.wire.errors import WireError
from kvd.wire.frame import Message, decode, encode, kind_of
from kvd.wire.lease import LeaseExtend
from kvd.wire.order import ClearForced, ForceMiss
from kvd.wire.push import PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.registration import (
    Heartbeat,
    NotRegistered,
    Registered,
    RegisterScheduler,
    RegisterWorker,
    Unregister,
)
from kvd.wire.reply import Refused

log = logging.getLogger(__name__)

Card = Callable[[], RegisterWorker | RegisterScheduler]
Push = Callable[[Message], Message | None]
Fresh = Message | Callable[[], Message]

REQUESTS = (LeaseExtend, PushAnnounce, PushWithdraw, PushProgress, PushDone, GetSums, ForceMiss, ClearForced)
"""What kvd asks of a client: the correlation id is kvd's, and not that of anything asked here."""
MAX_MESSAGE_BYTES = 64 << 20
QUEUE = 4096
"""Most messages that wait to be sent, most calls in flight, most deliveries kept."""
REGISTER_AGAIN = (0.1, 2.0)
DELIVER_AGAIN = (0.25, 5.0)
"""First and longest pause before something that was refused is sent again, in seconds; it doubles in between."""
UNANSWERED_SECONDS = 5.0
"""Pause before a delivery is sent again on the same connection where no answer came: kvd may have much to do."""
GOODBYE_SECONDS = 0.5
TURN = 256
"""Most messages taken from the socket before the clocks are looked at."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """What the session knows of its kvd at one moment.

    ``connected``: kvd knows us and has answered lately. ``engine_generation`` is empty while workers of the engine are
    missing; ``host`` and ``port`` are where peers reach this kvd (port 0: nowhere). ``refusal`` is kvd's reason for not
    taking our card, None where it did. ``registrations`` counts the times that kvd took it.
    """

    connected: bool = False
    kvd_generation: str = ""
    engine_generation: str = ""
    host: str = ""
    port: int = 0
    refusal: Refused | None = None
    registrations: int = 0


@dataclass(slots=True)
class Pending:
    """One call or delivery that waits for its answer; times are time.monotonic() seconds."""

    message: Fresh
    future: Future[Message]
    gives_up: float
    timeout: float
    key: str | None = None
    due: float = 0.0
    pause: float = DELIVER_AGAIN[0]


@dataclass(slots=True)
class Mailbox:
    """What the session's thread and its callers both touch: the queue, the newest state, the wish to end.

    ``inbox`` is appended to by callers and emptied by the thread (both are atomic on a deque); ``wake`` is an eventfd.
    ``state`` is replaced, never changed, so that reading it needs no lock.
    """

    address: str
    name: str
    card: Card
    on_push: Push | None
    wake: int
    state: SessionState = field(default_factory=SessionState)
    changed: threading.Condition = field(default_factory=threading.Condition)
    inbox: deque[Pending | Message] = field(default_factory=deque)
    counters: Counter[str] = field(default_factory=Counter)
    closing: bool = False

    def publish(self, state: SessionState) -> None:
        """Put a new state in the place of the old one, and tell who waits for it."""
        if state != self.state:
            with self.changed:
                self.state = state
                self.changed.notify_all()


class SessionThread:
    """What belongs to the session's thread alone: the socket, the clocks, and all that waits for an answer."""

    def __init__(self, shared: Mailbox) -> None:
        self.shared = shared
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = _open(self.context)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(shared.address)  # after the monitor: it must see this connection succeed
        self.poller = zmq.Poller()
        for source in (self.socket, self.monitor, shared.wake):
            self.poller.register(source, zmq.POLLIN)
        self.waiting: dict[int, Pending] = {}
        self.deliveries: dict[str, int] = {}
        self.last_id = 0
        self.registering = 0
        self.incarnation = ""
        self.linked = False
        self.register_due = 0.0
        self.register_pause = REGISTER_AGAIN[0]
        self.heartbeat = 0.25
        self.heartbeat_due = 0.0
        self.heard = 0.0

    def turn(self) -> None:
        """Wait for whatever comes first, then do all that is due."""
        ready = dict(self.poller.poll(self._pause_ms()))
        if self.shared.wake in ready:
            os.eventfd_read(self.shared.wake)
        if self.monitor in ready:
            self._connection_changed()
        if self.socket in ready:
            self._receive()
        self._take_inbox()
        self._keep_time(time.monotonic())

    def _pause_ms(self) -> int:
        now = time.monotonic()
        due = [now + 1.0]
        if self.linked:
            due.append(self.heartbeat_due if self.shared.state.connected else self.register_due)
        due += [min(k.gives_up, k.due) if self._registered() else k.gives_up for k in self.waiting.values()]
        return max(0, int((min(due) - now) * 1000) + 1)

    def _registered(self) -> bool:
        return self.linked and self.registering == 0 and bool(self.incarnation)

    # --- the connection ---

    def _connection_changed(self) -> None:
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            self.linked = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.incarnation = ""
            self.register_due, self.register_pause = 0.0, REGISTER_AGAIN[0]
            self.shared.counters["connections" if self.linked else "disconnections"] += 1
            if not self.linked:
                self.shared.publish(replace(self.shared.state, connected=False))

    def _send(self, message: Message, correlation: int) -> bool:
        try:
            self.socket.send(encode(message, correlation), zmq.NOBLOCK)
        except zmq.Again:
            self.shared.counters["unsent"] += 1
            return False
        return True

    def _next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def _register(self, now: float) -> None:
        self.register_due = now + self.register_pause
        self.register_pause = min(self.register_pause * 2, REGISTER_AGAIN[1])
        presented = self.shared.card()
        self.incarnation = (
            presented.card.incarnation if isinstance(presented, RegisterWorker) else presented.incarnation
        )
        self.registering = self._next_id()
        self._send(presented, self.registering)

    # --- what kvd sends ---

    def _receive(self) -> None:
        for _ in range(TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, correlation = decode(frames[-1])
            except WireError as error:
                self.shared.counters["unreadable"] += 1
                log.warning("%s: kvd sent what cannot be read: %s", self.shared.name, error.message)
                continue
            self.heard = time.monotonic()
            self._handle(message, correlation)

    def _handle(self, message: Message, correlation: int) -> None:
        if isinstance(message, Registered):
            self._now_registered(message, correlation)
        elif isinstance(message, NotRegistered):
            self._unknown_to_kvd(message.kvd_generation)
        elif isinstance(message, REQUESTS) or correlation == 0:
            self._pushed(message, correlation)
        elif isinstance(message, Refused) and correlation == self.registering:
            self.shared.counters["registrations.refused"] += 1
            log.warning(
                "%s: kvd refused the registration: %s %s", self.shared.name, message.code, message.message
            )
            self.shared.publish(replace(self.shared.state, connected=False, refusal=message))
        elif kept := self.waiting.get(correlation):
            self._answered(kept, message, correlation)

    def _now_registered(self, message: Registered, correlation: int) -> None:
        state = self.shared.state
        another = bool(state.kvd_generation) and message.kvd_generation != state.kvd_generation
        if another and (correlation == 0 or correlation != self.registering):
            self._unknown_to_kvd(message.kvd_generation)
            return
        self.heartbeat = min(max(message.heartbeat_seconds, 0.02), 60.0)
        taken = correlation != 0 and correlation == self.registering
        if taken:
            self.registering = 0
            self.register_pause = REGISTER_AGAIN[0]
            self.heartbeat_due = self.heard + self.heartbeat
            for kept in self.waiting.values():
                kept.due = 0.0
        if self.registering:
            return  # an answer to an older heartbeat; ours to the card is on its way
        self.shared.publish(
            SessionState(
                connected=True,
                kvd_generation=message.kvd_generation,
                engine_generation=message.engine_generation,
                host=message.host,
                port=message.port,
                registrations=state.registrations + taken,
            )
        )

    def _unknown_to_kvd(self, generation: str) -> None:
        self.shared.publish(
            replace(self.shared.state, connected=False, kvd_generation=generation, engine_generation="")
        )
        if self.registering == 0:
            self.register_due, self.register_pause = 0.0, REGISTER_AGAIN[0]

    def _pushed(self, message: Message, correlation: int) -> None:
        self.shared.counters[f"pushed.{kind_of(message)}"] += 1
        answer: Message | None = None
        try:
            if self.shared.on_push is not None:
                answer = self.shared.on_push(message)
        except Exception as error:
            self.shared.counters["push.errors"] += 1
            log.exception("%s: the handler of %s failed", self.shared.name, kind_of(message))
            answer = Refused(code="KVD-CLIENT-ERROR", message=f"{type(error).__name__}: {error}")
        if correlation:
            if answer is None:
                nobody = f"{self.shared.name} takes no {kind_of(message)}"
                answer = Refused(code="KVD-NOT-TAKEN", message=nobody, final=True)
            self._send(answer, correlation)

    def _answered(self, kept: Pending, message: Message, correlation: int) -> None:
        if isinstance(message, Refused) and kept.key is not None:
            self.shared.counters["deliveries.refused"] += 1
            what = "given up" if message.final else "kept"
            log.info("%s: delivery %s refused, %s: %s", self.shared.name, kept.key, what, message.message)
            if not message.final:
                kept.due = time.monotonic() + kept.pause
                kept.pause = min(kept.pause * 2, DELIVER_AGAIN[1])
                return
        self._forget(correlation, kept)
        if isinstance(message, Refused):
            fail(kept, RefusedByDaemon(message))
        elif not kept.future.done():
            kept.future.set_result(message)

    # --- what is to be sent ---

    def _take_inbox(self) -> None:
        while self.shared.inbox:
            item = self.shared.inbox.popleft()
            if not isinstance(item, Pending):
                if not (self._registered() and self._send(item, 0)):
                    self.shared.counters["dropped"] += 1
                continue
            if item.key is not None and (older := self.deliveries.get(item.key)):
                fail(self.waiting.pop(older), ClientError(f"a newer delivery {item.key!r} took its place"))
            if len(self.waiting) >= QUEUE:
                self.shared.counters["dropped"] += 1
                fail(item, ClientError(f"{QUEUE} messages wait already for kvd at {self.shared.address}"))
                continue
            correlation = self._next_id()
            self.waiting[correlation] = item
            if item.key is not None:
                self.deliveries[item.key] = correlation

    def _keep_time(self, now: float) -> None:
        state = self.shared.state
        if state.connected and now - self.heard > max(1.0, 4 * self.heartbeat):
            self.shared.publish(
                replace(state, connected=False)
            )  # kvd is stopped or stuck: not to be relied on
            self.register_due = now
        if self.linked:
            if self.shared.state.connected:
                if now >= self.heartbeat_due:
                    self.heartbeat_due = now + self.heartbeat
                    self._send(Heartbeat(incarnation=self.incarnation), self._next_id())
            elif now >= self.register_due:
                self._register(now)
        sendable = self._registered()
        for correlation, kept in list(self.waiting.items()):
            if now >= kept.gives_up:
                self._give_up(correlation, kept)
            elif sendable and now >= kept.due:
                self._send_kept(correlation, kept, now)

    def _send_kept(self, correlation: int, kept: Pending, now: float) -> None:
        message = kept.message() if callable(kept.message) else kept.message
        sent = self._send(message, correlation)
        if kept.key is None and sent:
            kept.due = kept.gives_up  # a call is sent once a connection; registering again makes it due again
        else:
            kept.due = now + (UNANSWERED_SECONDS if sent else DELIVER_AGAIN[0])

    def _give_up(self, correlation: int, kept: Pending) -> None:
        self._forget(correlation, kept)
        if kept.key is not None:
            self.shared.counters["deliveries.dropped"] += 1
            log.error("%s: delivery %s dropped after %g s", self.shared.name, kept.key, kept.timeout)
        if self.shared.state.connected:
            fail(kept, TimedOut(f"kvd at {self.shared.address} did not answer within {kept.timeout:g} s"))
        else:
            fail(
                kept,
                Unreachable(
                    f"kvd at {self.shared.address} could not be reached within {kept.timeout:g} s",
                    hint="see `systemctl status kvd`",
                ),
            )

    def _forget(self, correlation: int, kept: Pending) -> None:
        self.waiting.pop(correlation, None)
        if kept.key is not None and self.deliveries.get(kept.key) == correlation:
            del self.deliveries[kept.key]

    # --- the end ---

    def goodbye(self) -> None:
        """Send what was accepted before the close, unregister, and wait a bounded time for the answers."""
        self._take_inbox()
        if self._registered():
            for kept in self.waiting.values():
                kept.due = kept.due if kept.key is None else 0.0  # nothing is put off any more
            self._keep_time(time.monotonic())
            farewell = Pending(Unregister(incarnation=self.incarnation), Future(), 0.0, 0.0)
            correlation = self._next_id()
            self.waiting[correlation] = farewell
            self._send(Unregister(incarnation=self.incarnation), correlation)
            deadline = time.monotonic() + GOODBYE_SECONDS
            while self.waiting and (left := deadline - time.monotonic()) > 0:
                if self.socket.poll(max(1, int(left * 1000))):
                    self._receive()

    def close(self) -> None:
        """Fail whatever still waits, and close the sockets."""
        for item in [*self.waiting.values(), *self.shared.inbox]:
            if isinstance(item, Pending):
                fail(item, ClientError("the session was closed before kvd answered"))
        self.waiting.clear()
        self.shared.inbox.clear()
        self.socket.disable_monitor()
        self.context.destroy(linger=0)


def _open(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    opened = context.socket(zmq.DEALER)
    options = {
        zmq.LINGER: 0,
        zmq.IMMEDIATE: 1,  # nothing is queued for a kvd that is away: what matters is kept and sent again
        zmq.SNDHWM: QUEUE,
        zmq.RCVHWM: QUEUE,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.RECONNECT_IVL: 50,
        zmq.RECONNECT_IVL_MAX: 100,
        zmq.HEARTBEAT_IVL: 1000,
        zmq.HEARTBEAT_TIMEOUT: 5000,
    }
    for option, value in options.items():
        opened.setsockopt(option, value)
    return opened


def fail(kept: Pending, error: ClientError) -> None:
    """End what waits with an error, unless it has ended already."""
    if not kept.future.done():
        kept.future.set_exception(error)
