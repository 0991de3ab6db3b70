"""The thread's side of a session: the socket, the clocks, and all that waits for an answer.

A message goes out on its caller's thread where nothing is before it. Else the caller, who may be vLLM's scheduler,
would wake this thread and go on, and the message would wait until this thread has Python's lock, and takes it from
whatever launches a step by then.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Literal

from kvd.client.errors import ClientError, ProtocolError, RefusedByDaemon, TimedOut, Unencodable, Unreachable
from kvd.client.line import LocalLine
from kvd.client.mailbox import DELIVER_AGAIN, QUEUE, Fresh, Mailbox, Pending, SessionState, fail
from kvd.client.packing import packed
from kvd.geometry.errors import BadGeometry
from kvd.shown import logger
from kvd.wire.errors import WireError
from kvd.wire.frame import Message, decode, encode, kind_of
from kvd.wire.registration import Heartbeat, NotRegistered, Registered, RegisterWorker, Unregister
from kvd.wire.reply import Refused, Reply, refusal

log = logger(__name__)

REGISTER_AGAIN = (0.1, 2.0)
"""First and longest pause before a card that was refused is sent again, in seconds; it doubles in between."""
UNANSWERED_SECONDS = 5.0
"""Pause before a delivery is sent again on the same connection where no answer came: kvd may have much to do."""
GOODBYE_SECONDS = 0.5
TURN = 256
"""Most messages taken from the socket before the clocks are looked at."""


Registration = Literal["away", "unknown", "presented", "registered"]
"""How kvd knows us: there is no connection; it does not; the card is on its way; it does.

unknown → presented: the card is sent, again and again until it is taken. presented → registered: kvd took it. Any →
away and away → unknown: the connection was lost, or made. registered → unknown: kvd is another one, says that it does
not know us, or has been silent for too long.
"""


class SessionThread:
    """The socket, the clocks, and all that waits for an answer.

    ``_turn`` is held by the thread but for its waits, and by a caller while it sends. No caller does once the thread is
    ``_leaving``.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self._turn = threading.Lock()
        self._leaving = False
        self.line = LocalLine(
            mailbox.address, (mailbox.wake, mailbox.alarm.fileno()), self._connection_changed
        )
        self.waiting: dict[int, Pending] = {}
        self.deliveries: dict[str, int] = {}
        self.last_id = 0
        self.registration: Registration = "away"
        self.card_id = 0  # the correlation of the card that was sent last, 0 once it was taken
        self.incarnation = ""
        self.packs = True  # until this connection's kvd says that it cannot read a packed card
        self.register_due = 0.0
        self.register_pause = REGISTER_AGAIN[0]
        self.heartbeat = 0.25
        self.heartbeat_due = 0.0
        self.last_received = 0.0

    def turn(self) -> None:
        """Wait for whatever comes first, then do all that is due."""
        with self._turn:
            pause = self._pause_ms()
        self._wait(pause)
        with self._turn:
            self.line.flush()
            self._receive()
            self._take_inbox()
            self._keep_time(time.monotonic())

    def send_now(self, pending: Pending) -> bool:
        """On any thread: send what no due message is ahead of. False where it has to be posted; never waits.

        Deliveries that are put off do not hold it up, but an earlier one with its key does.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            now, registered = time.monotonic(), self.registration == "registered" and not self._leaving
            free = registered and self.line.is_free() and len(self.waiting) < QUEUE
            if not free or now >= pending.gives_up or self._any_before(pending, now):
                return False
            self._replace(pending)
            correlation = self._note(pending)
            self._send_pending(correlation, pending, now)
            if correlation in self.waiting:
                self.mailbox.alarm.by(min(pending.due, pending.gives_up))
            if not self.line.is_free():
                self.mailbox.rouse()
            return True
        finally:
            self._turn.release()

    def _any_before(self, pending: Pending, now: float) -> bool:
        """Whether something that is due, or has its key, has not been sent."""
        inbox, key = list(self.mailbox.inbox), pending.key
        due = any(item.due <= now for item in (*inbox, *self.waiting.values()))
        return due or (key is not None and any(item.key == key for item in inbox))

    def _wait(self, milliseconds: int) -> None:
        if self.line.wait(milliseconds):
            self.mailbox.woken()

    def _pause_ms(self) -> int:
        now = time.monotonic()
        due = [now + 1.0]
        known = self.registration == "registered"
        if self.registration != "away":
            due.append(self.heartbeat_due if known else self.register_due)
        due += [min(k.gives_up, k.due) if known else k.gives_up for k in self.waiting.values()]
        return max(0, int((min(due) - now) * 1000) + 1)

    # --- the connection ---

    def _connection_changed(self, made: bool) -> None:
        self.mailbox.counters["connections" if made else "disconnections"] += 1
        self.packs = True
        self._present_again("unknown" if made else "away")
        if not made:
            self.mailbox.publish(replace(self.mailbox.state, connected=False))

    def _send(self, message: Fresh, correlation: int) -> bool:
        """Send now; False where that is not possible. Raises `Unencodable`, which has been counted and logged."""
        try:
            frame = encode(message() if callable(message) else message, correlation)
        except Exception as error:  # what is wrong with one message must not keep the others from being sent
            self.mailbox.counters["unencodable"] += 1
            why = f"a message cannot be encoded: {type(error).__name__}: {error}"
            log.error("%s: %s", self.mailbox.name, why)  # noqa: TRY400 (the sender's future has the traceback)
            raise Unencodable(why) from error
        if not self.line.send(frame):
            self.mailbox.counters["unsent"] += 1
            return False
        return True

    def _next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def _present_again(self, registration: Registration) -> None:
        self.registration = registration
        self.register_due, self.register_pause = 0.0, REGISTER_AGAIN[0]

    def _register(self, now: float) -> None:
        self.register_due = now + self.register_pause
        self.register_pause = min(self.register_pause * 2, REGISTER_AGAIN[1])
        presented = self.mailbox.card()
        if self.packs and isinstance(presented, RegisterWorker):
            presented = packed(presented)
        self.incarnation = (
            presented.card.incarnation if isinstance(presented, RegisterWorker) else presented.incarnation
        )
        self.registration, self.card_id = "presented", self._next_id()
        self._send(presented, self.card_id)

    # --- what kvd sends ---

    def _receive(self) -> None:
        for frame in islice(self.line.received(), TURN):
            try:
                message, correlation = decode(frame)
            except WireError as error:
                self.mailbox.counters["unreadable"] += 1
                log.warning("%s: kvd sent what cannot be read: %s", self.mailbox.name, error.message)
                self._unreadable(error)
                continue
            self.last_received = time.monotonic()
            self._handle(message, correlation)

    def _unreadable(self, error: WireError) -> None:
        """Who asked need not wait for an answer that came; a delivery is sent again when it is due."""
        pending = self.waiting.get(error.correlation)
        if pending is not None and pending.key is None:
            self._forget(error.correlation, pending)
            fail(pending, ProtocolError(f"kvd's answer cannot be read: {error.message}"))

    def _handle(self, message: Message, correlation: int) -> None:
        if isinstance(message, Registered):
            self._now_registered(message, correlation)
        elif isinstance(message, NotRegistered):
            self._unknown_to_kvd(message.kvd_generation)
        elif correlation == 0 or not isinstance(message, Reply):
            self._on_message(message, correlation)
        elif isinstance(message, Refused) and correlation == self.card_id:
            if self.packs and message.code == BadGeometry.code:
                self.packs = False  # a kvd of before; or the geometry is bad, which it will say again
                self._present_again("unknown")
                return
            self.mailbox.counters["registrations.refused"] += 1
            log.warning(
                "%s: kvd refused the registration: %s %s", self.mailbox.name, message.code, message.message
            )
            self.mailbox.publish(replace(self.mailbox.state, connected=False, refusal=message))
        elif pending := self.waiting.get(correlation):
            self._answered(pending, message, correlation)

    def _now_registered(self, message: Registered, correlation: int) -> None:
        state = self.mailbox.state
        another = bool(state.kvd_generation) and message.kvd_generation != state.kvd_generation
        taken = correlation != 0 and correlation == self.card_id
        if another and not taken:
            self._unknown_to_kvd(message.kvd_generation)
            return
        self.heartbeat = min(max(message.heartbeat_seconds, 0.02), 60.0)
        if taken:
            self.registration, self.card_id = "registered", 0
            self.register_pause = REGISTER_AGAIN[0]
            self.heartbeat_due = self.last_received + self.heartbeat
            for pending in self.waiting.values():
                pending.due = 0.0
        if self.registration != "registered":
            return  # an answer to an older heartbeat; ours to the card is on its way
        self.mailbox.publish(
            SessionState(
                connected=True,
                kvd_generation=message.kvd_generation,
                engine_generation=message.engine_generation,
                compatibility_class=message.compatibility_class,
                host=message.host,
                port=message.port,
                registrations=state.registrations + taken,
            )
        )

    def _unknown_to_kvd(self, generation: str) -> None:
        self.mailbox.publish(
            replace(self.mailbox.state, connected=False, kvd_generation=generation, engine_generation="")
        )
        if self.registration == "registered":
            self._present_again("unknown")

    def _on_message(self, message: Message, correlation: int) -> None:
        self.mailbox.counters[f"pushed.{kind_of(message)}"] += 1
        answer: Message | None = None
        try:
            if self.mailbox.on_push is not None:
                answer = self.mailbox.on_push(message)
        except Exception as error:
            self.mailbox.counters["push.errors"] += 1
            log.exception("%s: the handler of %s failed", self.mailbox.name, kind_of(message))
            answer = refusal(code="KVD-CLIENT-ERROR", message=f"{type(error).__name__}: {error}")
        if correlation:
            if answer is None:
                nobody = f"{self.mailbox.name} takes no {kind_of(message)}"
                answer = refusal(code="KVD-NOT-TAKEN", message=nobody, final=True)
            try:
                self._send(answer, correlation)
            except Unencodable as error:
                self._send(refusal(code="KVD-CLIENT-ERROR", message=error.message), correlation)

    def _answered(self, pending: Pending, message: Message, correlation: int) -> None:
        if isinstance(message, Refused) and pending.key is not None:
            self.mailbox.counters["deliveries.refused"] += 1
            what = "given up" if message.final else "kept"
            log.info("%s: delivery %s refused, %s: %s", self.mailbox.name, pending.key, what, message.message)
            if not message.final:
                pending.due = time.monotonic() + pending.pause
                pending.pause = min(pending.pause * 2, DELIVER_AGAIN[1])
                return
        self._forget(correlation, pending)
        if isinstance(message, Refused):
            fail(pending, RefusedByDaemon(message))
        elif not pending.future.done():
            pending.future.set_result(message)

    # --- what is to be sent ---

    def _take_inbox(self) -> None:
        while self.mailbox.inbox:
            item = self.mailbox.inbox.popleft()
            self._replace(item)
            if len(self.waiting) >= QUEUE:
                self.mailbox.counters["dropped"] += 1
                fail(item, ClientError(f"{QUEUE} messages wait already for kvd at {self.mailbox.address}"))
                continue
            self._note(item)

    def _replace(self, item: Pending) -> None:
        """Give up the older delivery with its key."""
        if item.key is not None and (older := self.deliveries.get(item.key)):
            fail(self.waiting.pop(older), ClientError(f"a newer delivery {item.key!r} took its place"))

    def _note(self, item: Pending) -> int:
        """It waits for its answer from now on: the number that this has."""
        correlation = self._next_id()
        self.waiting[correlation] = item
        if item.key is not None:
            self.deliveries[item.key] = correlation
        return correlation

    def _keep_time(self, now: float) -> None:
        if self.registration == "registered" and now - self.last_received > max(1.0, 4 * self.heartbeat):
            self.mailbox.publish(replace(self.mailbox.state, connected=False))  # kvd is stopped or stuck
            self.registration, self.register_due = "unknown", now
        if self.registration == "registered":
            if now >= self.heartbeat_due:
                self.heartbeat_due = now + self.heartbeat
                self._send(Heartbeat(incarnation=self.incarnation), self._next_id())
        elif self.registration != "away" and now >= self.register_due:
            self._register(now)
        for correlation, pending in list(self.waiting.items()):
            if now >= pending.gives_up:
                self._give_up(correlation, pending)
            elif self.registration == "registered" and now >= pending.due:
                self._send_pending(correlation, pending, now)

    def _send_pending(self, correlation: int, pending: Pending, now: float) -> None:
        try:
            sent = self._send(pending.message, correlation)
        except Unencodable as error:
            self._forget(correlation, pending)
            fail(pending, error)
            return
        if pending.key is None and sent:
            pending.due = pending.gives_up  # it is sent once a connection; registering makes it due again
        else:
            pending.due = now + (UNANSWERED_SECONDS if sent else DELIVER_AGAIN[0])

    def _give_up(self, correlation: int, pending: Pending) -> None:
        self._forget(correlation, pending)
        if pending.key is not None:
            self.mailbox.counters["deliveries.dropped"] += 1
            log.error("%s: delivery %s dropped after %g s", self.mailbox.name, pending.key, pending.timeout)
        if self.mailbox.state.connected:
            why = f"kvd at {self.mailbox.address} did not answer within {pending.timeout:g} s"
            fail(pending, TimedOut(why))
        else:
            why = f"kvd at {self.mailbox.address} could not be reached within {pending.timeout:g} s"
            fail(pending, Unreachable(why, hint="see `systemctl status kvd`"))

    def _forget(self, correlation: int, pending: Pending) -> None:
        self.waiting.pop(correlation, None)
        if pending.key is not None and self.deliveries.get(pending.key) == correlation:
            del self.deliveries[pending.key]

    # --- the end ---

    def goodbye(self) -> None:
        """Send what was accepted before the close, unregister, and wait a bounded time for the answers."""
        with self._turn:
            self._leaving = True
        self._take_inbox()
        if self.registration == "registered":
            for pending in self.waiting.values():
                pending.due = pending.due if pending.key is None else 0.0  # nothing is put off any more
            self._keep_time(time.monotonic())
            farewell = Pending(Unregister(incarnation=self.incarnation), Future(), 0.0, 0.0)
            correlation = self._next_id()
            self.waiting[correlation] = farewell
            self._send(Unregister(incarnation=self.incarnation), correlation)
            deadline = time.monotonic() + GOODBYE_SECONDS
            while self.waiting and (left := deadline - time.monotonic()) > 0:
                self._wait(max(1, int(left * 1000)))
                self.line.flush()
                self._receive()

    def close(self) -> None:
        """Fail whatever still waits, and close the connection."""
        for item in [*self.waiting.values(), *self.mailbox.inbox]:
            fail(item, ClientError("the session was closed before kvd answered"))
        self.waiting.clear()
        self.mailbox.inbox.clear()
        self.line.close()
