"""A worker's or a scheduler's lasting session with its kvd: one thread, one socket, nothing that blocks the caller.

The session is level-triggered. It keeps no record of what kvd knows; whenever the connection, kvd's generation or kvd's
own word says that kvd does not know us, the card is asked for again and sent. Whatever must not get lost is kept here
until kvd has answered it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvd.client.errors import ClientError, RefusedByDaemon, TimedOut, Unreachable
from kvd.wire.errors import WireError
from kvd.wire.frame import Message, decode, encode, kind_of
from kvd.wire.lease import LeaseExtend
from kvd.wire.names import runtime_dir, socket_address
from kvd.wire.registration import Heartbeat, NotRegistered, Registered, RegisterScheduler, RegisterWorker, Unregister
from kvd.wire.reply import Refused

log = logging.getLogger(__name__)

Card = Callable[[], RegisterWorker | RegisterScheduler]
Push = Callable[[Message], Message | None]
Fresh = Message | Callable[[], Message]

MAX_MESSAGE_BYTES = 64 << 20
QUEUE = 4096
"""Most messages that wait to be sent, most calls in flight, most deliveries kept."""
REGISTER_AGAIN = (0.1, 2.0)
DELIVER_AGAIN = (0.25, 5.0)
"""First and longest pause before something is sent again, in seconds; it doubles in between."""
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
class _Kept:
    """One call or delivery that waits for its answer; times are time.monotonic() seconds."""

    message: Fresh
    future: Future[Message]
    gives_up: float
    timeout: float
    key: str | None = None
    due: float = 0.0
    pause: float = DELIVER_AGAIN[0]


class Session:
    """A client's session with its kvd. The public methods may be called from any thread and never wait for I/O.

    ``card`` is called on the session's thread whenever kvd has to be told who we are. ``on_push`` gets what kvd sends
    unasked, on the session's thread: it must be quick; what it returns for a request of kvd's (`LeaseExtend`) is sent
    back as its answer. ``directory`` is the runtime directory of kvd, ``name`` stands in log lines.

    The thread starts at once. After a fork make a new session: an inherited one refuses every call.
    """

    def __init__(
        self,
        card: Card,
        on_push: Push | None = None,
        *,
        directory: str | Path | None = None,
        name: str = "kvd-session",
    ) -> None:
        self.address = socket_address(runtime_dir(None if directory is None else str(directory)))
        self.counters: Counter[str] = Counter()
        self._card = card
        self._on_push = on_push
        self._name = name
        self._pid = os.getpid()
        self._state = SessionState()
        self._changed = threading.Condition()
        self._inbox: deque[_Kept | Message] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def state(self) -> SessionState:
        """The newest state: an immutable value, read without a lock."""
        return self._state

    def wait(self, until: Callable[[SessionState], bool], timeout: float) -> SessionState:
        """Wait until the state is as wanted, at most ``timeout`` seconds. Raises `TimedOut`, with the state's reason."""
        with self._changed:
            if not self._changed.wait_for(lambda: until(self._state), timeout):
                refusal = self._state.refusal
                why = f"kvd refused: {refusal.message}" if refusal else f"state is {self._state}"
                raise TimedOut(f"{self._name}: not as awaited within {timeout:g} s: {why}")
            return self._state

    def call(self, message: Message, timeout: float) -> Future[Message]:
        """Ask; the future gets the answer, or `RefusedByDaemon`, `TimedOut`, `Unreachable` after ``timeout`` seconds.

        A call that is still wanted when the connection comes back is sent again: every request of the wire may be
        repeated. Where too many wait already the future holds a `ClientError` at once.
        """
        return self._put(_Kept(message, Future(), time.monotonic() + timeout, timeout))

    def deliver(self, key: str, message: Fresh, keep_seconds: float = 600.0) -> Future[Message]:
        """Send at least once: keep ``message`` under ``key`` and repeat it until kvd gave an answer that is no refusal.

        A newer message under the same key replaces the older one. A callable is called for each sending, on the
        session's thread, so that durations in it are fresh. After ``keep_seconds`` it is dropped, counted and logged,
        and the future holds the reason; nobody needs to look at the future.
        """
        return self._put(_Kept(message, Future(), time.monotonic() + keep_seconds, keep_seconds, key))

    def cast(self, message: Message) -> bool:
        """Send once, if that is possible now. False where the queue is full; drops are counted (``dropped``)."""
        if not self._usable() or len(self._inbox) >= QUEUE:
            self.counters["dropped"] += 1
            return False
        self._inbox.append(message)
        os.eventfd_write(self._wake, 1)
        return True

    def close(self, timeout: float = 2.0) -> None:
        """Say goodbye and end the thread, within ``timeout`` seconds. Whatever still waits fails. Idempotent."""
        if self._pid != os.getpid():
            return
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join(timeout)
        if self._wake >= 0 and not self._thread.is_alive():
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _usable(self) -> bool:
        return not self._closing and self._pid == os.getpid()

    def _put(self, kept: _Kept) -> Future[Message]:
        if not self._usable():
            why = "is closed" if self._pid == os.getpid() else f"belongs to process {self._pid}, this is {os.getpid()}"
            kept.future.set_exception(ClientError(f"the session {why}", hint="make a new Session"))
        elif len(self._inbox) >= QUEUE:
            self.counters["dropped"] += 1
            kept.future.set_exception(ClientError(f"{QUEUE} messages wait already for kvd at {self.address}"))
        else:
            self._inbox.append(kept)
            os.eventfd_write(self._wake, 1)
        return kept.future

    def _publish(self, state: SessionState) -> None:
        if state != self._state:
            with self._changed:
                self._state = state
                self._changed.notify_all()

    def _run(self) -> None:
        conversation = _Conversation(self)
        try:
            while not self._closing:
                try:
                    conversation.turn()
                except Exception:
                    self.counters["errors"] += 1
                    log.exception("%s: a turn of the session failed; going on", self._name)
                    time.sleep(0.05)  # a cause that stays must not spin
            conversation.goodbye()
        except Exception:
            log.exception("%s: the goodbye failed", self._name)
        finally:
            conversation.close()
            self._publish(replace(self._state, connected=False))


class _Conversation:
    """What belongs to the session's thread alone: the socket, the clocks, and all that waits for an answer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = _open(self.context, session.address)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.poller = zmq.Poller()
        for source in (self.socket, self.monitor, session._wake):
            self.poller.register(source, zmq.POLLIN)
        self.waiting: dict[int, _Kept] = {}
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
        if self.session._wake in ready:
            os.eventfd_read(self.session._wake)
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
            due.append(self.heartbeat_due if self.session.state.connected else self.register_due)
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
            self.session.counters["connections" if self.linked else "disconnections"] += 1
            if not self.linked:
                self.session._publish(replace(self.session.state, connected=False))

    def _send(self, message: Message, correlation: int) -> bool:
        try:
            self.socket.send(encode(message, correlation), zmq.NOBLOCK)
        except zmq.Again:
            self.session.counters["unsent"] += 1
            return False
        return True

    def _next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def _register(self, now: float) -> None:
        self.register_due = now + self.register_pause
        self.register_pause = min(self.register_pause * 2, REGISTER_AGAIN[1])
        presented = self.session._card()
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
                self.session.counters["unreadable"] += 1
                log.warning("%s: kvd sent what cannot be read: %s", self.session._name, error.message)
                continue
            self.heard = time.monotonic()
            self._handle(message, correlation)

    def _handle(self, message: Message, correlation: int) -> None:
        if isinstance(message, Registered):
            self._now_registered(message, correlation)
        elif isinstance(message, NotRegistered):
            self._unknown_to_kvd(message.kvd_generation)
        elif isinstance(message, LeaseExtend) or correlation == 0:
            self._pushed(message, correlation)
        elif isinstance(message, Refused) and correlation == self.registering:
            self.session.counters["registrations.refused"] += 1
            log.warning("%s: kvd refused the registration: %s %s", self.session._name, message.code, message.message)
            self.session._publish(replace(self.session.state, connected=False, refusal=message))
        elif kept := self.waiting.get(correlation):
            self._answered(kept, message, correlation)

    def _now_registered(self, message: Registered, correlation: int) -> None:
        state = self.session.state
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
        self.session._publish(
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
        self.session._publish(
            replace(self.session.state, connected=False, kvd_generation=generation, engine_generation="")
        )
        if self.registering == 0:
            self.register_due, self.register_pause = 0.0, REGISTER_AGAIN[0]

    def _pushed(self, message: Message, correlation: int) -> None:
        self.session.counters[f"pushed.{kind_of(message)}"] += 1
        if self.session._on_push is None:
            return
        try:
            answer = self.session._on_push(message)
        except Exception as error:
            self.session.counters["push.errors"] += 1
            log.exception("%s: the handler of %s failed", self.session._name, kind_of(message))
            answer = Refused(code="KVD-CLIENT-ERROR", message=f"{type(error).__name__}: {error}")
        if correlation and answer is not None:
            self._send(answer, correlation)

    def _answered(self, kept: _Kept, message: Message, correlation: int) -> None:
        if isinstance(message, Refused) and kept.key is not None:
            self.session.counters["deliveries.refused"] += 1
            log.info("%s: delivery %s refused, kept: %s", self.session._name, kept.key, message.message)
            return
        self._forget(correlation, kept)
        if isinstance(message, Refused):
            _fail(kept, RefusedByDaemon(message))
        elif not kept.future.done():
            kept.future.set_result(message)

    # --- what is to be sent ---

    def _take_inbox(self) -> None:
        while self.session._inbox:
            item = self.session._inbox.popleft()
            if not isinstance(item, _Kept):
                if not (self._registered() and self._send(item, 0)):
                    self.session.counters["dropped"] += 1
                continue
            if item.key is not None and (older := self.deliveries.get(item.key)):
                _fail(self.waiting.pop(older), ClientError(f"a newer delivery {item.key!r} took its place"))
            if len(self.waiting) >= QUEUE:
                self.session.counters["dropped"] += 1
                _fail(item, ClientError(f"{QUEUE} messages wait already for kvd at {self.session.address}"))
                continue
            correlation = self._next_id()
            self.waiting[correlation] = item
            if item.key is not None:
                self.deliveries[item.key] = correlation

    def _keep_time(self, now: float) -> None:
        state = self.session.state
        if state.connected and now - self.heard > max(1.0, 4 * self.heartbeat):
            self.session._publish(replace(state, connected=False))  # kvd is stopped or stuck: not to be relied on
            self.register_due = now
        if self.linked:
            if self.session.state.connected:
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

    def _send_kept(self, correlation: int, kept: _Kept, now: float) -> None:
        message = kept.message() if callable(kept.message) else kept.message
        sent = self._send(message, correlation)
        if kept.key is None and sent:
            kept.due = kept.gives_up  # a call is sent once a connection; registering again makes it due again
        else:
            kept.due = now + (kept.pause if sent else DELIVER_AGAIN[0])
            kept.pause = min(kept.pause * 2, DELIVER_AGAIN[1])

    def _give_up(self, correlation: int, kept: _Kept) -> None:
        self._forget(correlation, kept)
        if kept.key is not None:
            self.session.counters["deliveries.dropped"] += 1
            log.error("%s: delivery %s dropped after %g s", self.session._name, kept.key, kept.timeout)
        if self.session.state.connected:
            _fail(kept, TimedOut(f"kvd at {self.session.address} did not answer within {kept.timeout:g} s"))
        else:
            _fail(
                kept,
                Unreachable(
                    f"kvd at {self.session.address} could not be reached within {kept.timeout:g} s",
                    hint="see `systemctl status kvd`",
                ),
            )

    def _forget(self, correlation: int, kept: _Kept) -> None:
        self.waiting.pop(correlation, None)
        if kept.key is not None and self.deliveries.get(kept.key) == correlation:
            del self.deliveries[kept.key]

    # --- the end ---

    def goodbye(self) -> None:
        """Send what was accepted before the close, unregister, and wait a bounded time for both to be answered."""
        self._take_inbox()
        if self._registered():
            self._keep_time(time.monotonic())
            farewell = _Kept(Unregister(incarnation=self.incarnation), Future(), 0.0, 0.0)
            correlation = self._next_id()
            self.waiting[correlation] = farewell
            self._send(Unregister(incarnation=self.incarnation), correlation)
            deadline = time.monotonic() + GOODBYE_SECONDS
            while self.waiting and (left := deadline - time.monotonic()) > 0:
                if self.socket.poll(max(1, int(left * 1000))):
                    self._receive()

    def close(self) -> None:
        """Fail whatever still waits, and close the sockets."""
        for item in [*self.waiting.values(), *self.session._inbox]:
            if isinstance(item, _Kept):
                _fail(item, ClientError("the session was closed before kvd answered"))
        self.waiting.clear()
        self.session._inbox.clear()
        self.socket.disable_monitor()
        self.context.destroy(linger=0)


def _open(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
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
    opened.connect(address)
    return opened


def _fail(kept: _Kept, error: ClientError) -> None:
    if not kept.future.done():
        kept.future.set_exception(error)
