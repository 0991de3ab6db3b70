"""What the thread of a session and its callers share: messages that wait, and the newest state."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from kvd.client.alarm import Alarm
from kvd.client.errors import ClientError
from kvd.wire.frame import Message
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from kvd.wire.reply import Refused

MakeCard = Callable[[], RegisterWorker | RegisterScheduler]
OnPush = Callable[[Message], Message | None]
Fresh = Message | Callable[[], Message]

QUEUE = 4096
"""Most messages that wait to be sent, most calls in flight, most deliveries kept."""
DELIVER_AGAIN = (0.25, 5.0)
"""First and longest pause before a delivery that was refused is sent again, in seconds; it doubles in between."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """What the session knows of its kvd at one moment.

    ``connected``: kvd knows us and has answered lately. ``engine_generation`` is empty while workers of the engine are
    missing; ``host`` and ``port`` are where peers reach this kvd (port 0: nowhere). ``refusal`` is kvd's reason for not
    taking our card, None where it did. ``registrations`` counts the times that kvd took it. ``since`` is when
    ``connected`` last changed (time.monotonic()).
    """

    connected: bool = False
    kvd_generation: str = ""
    engine_generation: str = ""
    compatibility_class: str = ""
    host: str = ""
    port: int = 0
    refusal: Refused | None = None
    registrations: int = 0
    since: float = 0.0


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

    ``inbox`` is appended to by callers and emptied by the thread (both are atomic on a deque). ``wake`` is an eventfd,
    -1 once it is closed. ``alarm`` wakes the thread for what is not due yet, which may be posted within vLLM's step.
    ``state`` is replaced, never changed, so that reading it needs no lock.
    """

    address: str
    name: str
    card: MakeCard
    on_push: OnPush | None
    wake: int
    alarm: Alarm
    state: SessionState = field(default_factory=lambda: SessionState(since=time.monotonic()))
    changed: threading.Condition = field(default_factory=threading.Condition)
    inbox: deque[Pending] = field(default_factory=deque)
    counters: Counter[str] = field(default_factory=Counter)
    closing: bool = False
    _open: threading.RLock = field(default_factory=threading.RLock)

    def post(self, pending: Pending) -> bool:
        """Put it into the inbox, and have the thread woken when it is due.

        False once the session closes, or where too many are in there.

        What is in the inbox before ``closing`` is seen by the thread; after it there is nobody to see it, and the
        number of ``wake`` may be another's.
        """
        with self._open:
            if self.closing or len(self.inbox) >= QUEUE:
                return False
            self.inbox.append(pending)
            if pending.due > time.monotonic():
                self.alarm.by(pending.due)
            else:
                self.rouse()
            return True

    def rouse(self) -> None:
        """Have the thread take a turn."""
        with self._open:
            if self.wake >= 0:
                os.eventfd_write(self.wake, 1)

    def woken(self) -> None:
        """On the thread: forget what woke it, before it looks into the inbox."""
        with contextlib.suppress(BlockingIOError):  # it was the alarm
            os.eventfd_read(self.wake)
        self.alarm.rung()

    def end(self) -> None:
        """Have the thread say goodbye; nothing is posted from now on. Idempotent."""
        with self._open:
            if not self.closing:
                self.closing = True
                self.rouse()

    def ended(self) -> None:
        """The thread is no more: close what woke it. Idempotent."""
        with self._open:
            if self.wake >= 0:
                os.close(self.wake)
                self.wake = -1
                self.alarm.close()

    def publish(self, state: SessionState) -> None:
        """Put a new state in the place of the old one, and tell who waits for it."""
        since = self.state.since if state.connected == self.state.connected else time.monotonic()
        state = replace(state, since=since)
        if state != self.state:
            with self.changed:
                self.state = state
                self.changed.notify_all()


def fail(pending: Pending, error: ClientError) -> None:
    """End what waits with an error, unless it has ended already."""
    if not pending.future.done():
        pending.future.set_exception(error)
