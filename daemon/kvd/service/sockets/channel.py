"""One connection: reads what is there within its budget, hands it over in turn, sends what waits for its peer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvd.service.fairness.queue import Path
from kvd.service.sockets.limits import (
    FRAME_LATE,
    FRAME_SECONDS,
    LONG_READ_BYTES,
    MESSAGES_A_STEP,
    READ_BYTES,
    SMALL_FRAME,
    UNSENT_PAUSE_BYTES,
)
from kvd.service.sockets.poller import HUNG_UP, READ, WRITE, Poller
from kvd.service.sockets.reservations import Hold, Reservations
from kvd.service.sockets.unsent import Unsent
from kvd.zmtp.connection import Connection
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, LargeBox, Received, Subscribed, Unsubscribed, ZmtpEvent
from kvd.zmtp.frames import COPIED, header

log = logging.getLogger(__name__)

MOST_BUFFERS = 64
"""Buffers given to the kernel in one call."""
ChannelEnd = ZmtpError | Literal["closed", "slow", "unread", "told"]
"""Why a connection ended: what its peer sent; its peer closed it; its peer took too long; it does not read; we did."""


class ChannelOwner(Protocol):
    """Who is told of what happens on a connection; called on the loop, must not wait."""

    def handshaken(self, channel: Channel, peer: Handshaken) -> None:
        """Both sides have spoken: messages may be sent."""

    def received(self, channel: Channel, message: Received, hold: Hold | None) -> None:
        """A message. Who still needs its memory after this returned keeps the ``hold`` until it does not."""

    def subscribed(self, channel: Channel, event: Subscribed | Unsubscribed) -> None:
        """The peer of a publisher wants something, or no more."""

    def ended(self, channel: Channel, cause: ChannelEnd) -> None:
        """It is over; nothing else is told of it from now on."""


@dataclass(frozen=True, slots=True)
class SocketContext:
    """What all connections of a kvd share."""

    poller: Poller
    reservations: Reservations
    unsent: Unsent
    opener: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "kvd-boxes"))
    """Opens large boxes: one at a time, so that kvd's loop has a processor to itself wherever there are two."""


class Channel:
    """A connection and its budgets. ``path`` says whose it is, ``pid`` and ``uid`` what the kernel knows of its peer.

    ``route`` names it to the rest of kvd. It is made here, cannot be guessed, and is never used again. ``key`` is the
    peer's public CURVE key. ``plain``: messages are not sealed.
    """

    __slots__ = (
        "_events", "_hold", "_late", "_mask", "_opening", "_outbox", "_owner", "_paused", "_sent_of_first", "_shared",
        "_socket", "_timer", "_zmtp", "ended", "first_since", "key", "mask", "path", "pid", "plain", "queued", "route",
        "uid", "unread_since", "unsent",
    )  # fmt: skip

    def __init__(
        self,
        connected: socket.socket,
        zmtp: Connection,
        owner: ChannelOwner,
        shared: SocketContext,
        path: Path,
        *,
        plain: bool,
    ) -> None:
        self.path, self.plain = path, plain
        self.route = os.urandom(16)
        self.pid, self.uid, self.key = 0, -1, b""
        self.mask, self.queued, self.ended = 0, False, False
        self.unsent, self.unread_since, self.first_since = 0, 0.0, 0.0
        self._socket, self._zmtp, self._owner, self._shared = connected, zmtp, owner, shared
        self._mask = READ
        self._events: Iterator[ZmtpEvent] | None = None  # of bytes that are here and not taken apart yet
        self._hold: Hold | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late = 0  # how often the frame that is coming has had more time
        self._opening = False  # a large box that has come, elsewhere
        self._paused = False  # what waits to be sent must be read first
        self._outbox: deque[bytes] = deque()
        self._sent_of_first = 0
        shared.poller.add(connected.fileno(), self, READ)
        self._put(zmtp.start())

    @property
    def ready(self) -> bool:
        """The handshake is over, and so may messages be sent."""
        return self._zmtp.ready and not self.ended

    @property
    def buffers(self) -> int:
        """How many buffers wait to be sent, one or two a message."""
        return len(self._outbox)

    def send(self, before: bytes, body: bytes) -> None:
        """Send a message of one frame, in two parts of which the second is not copied where it can be helped."""
        if self.ended:
            return
        if not self.plain:
            for buffer in self._zmtp.message(before + body):
                self._put(buffer)
            return
        head = header(0, len(before) + len(body)) + before
        if len(body) <= COPIED:
            self._put(head + body)
        else:
            self._put(head)
            self._put(body)

    def post(self, message: bytes) -> None:
        """Send what has its header already, with the next turn."""
        if self.ended:
            return
        self._keep(message)
        self.mask |= WRITE
        self._shared.poller.queue(self)

    def end(self, cause: ChannelEnd = "told") -> None:
        """Close it. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self._shared.poller.remove(self._socket.fileno())
        if isinstance(cause, ZmtpError) and not self._outbox and (farewell := self._zmtp.outgoing()):
            try:
                self._socket.send(farewell)
            except OSError:
                log.debug("the peer is gone before it could be told why")
        self._socket.close()
        self._events = None
        self._stop_timer()
        if not self._opening:  # else that box is in memory until it is its turn
            self._stop_waiting()
        if self._outbox:
            for buffer in self._outbox:
                self._shared.unsent.remove(self, buffer)
            self._outbox.clear()
            del self._shared.unsent.waiting[self]
        self._owner.ended(self, cause)

    def give_up(self) -> None:
        """End it: its peer does not read."""
        self.end("unread")

    def step(self) -> bool:
        """One small piece of work; whether there is more."""
        if self.ended:
            return False
        mask, self.mask = self.mask, 0
        if mask & WRITE:
            self.flush()
        if self._waits():
            if mask & HUNG_UP:
                self.end("closed")  # the kernel says so again and again; nothing can be read of what it sent
            return False
        try:
            if self._events is None and mask & ~WRITE and not self._read():
                return False
            if self._events is not None:
                self._hand_over()
        except ZmtpError as error:
            self.end(error)
        except OSError:
            self.end("closed")
        return self._events is not None and not self._waits()

    def _waits(self) -> bool:
        """Nothing is read or handed over now.

        It is over, a box is being opened, its peer does not read, or its next frame has no room yet.
        """
        if self.ended or self._opening or self._paused:
            return True
        return self._hold is not None and not self._hold.granted

    def _read(self) -> bool:
        wanted = self._zmtp.wanted
        size = min(wanted, LONG_READ_BYTES) if wanted > READ_BYTES else READ_BYTES
        try:
            data = self._socket.recv(size)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self.end("closed")
            return False
        self._events = self._zmtp.receive(data)
        return True

    def _hand_over(self) -> None:
        """Tell of a few of the messages that are here."""
        events = self._events
        for _ in range(MESSAGES_A_STEP):
            event = next(events, None) if events is not None else None
            if event is None:
                self._events = None
                break
            self._tell(event)
            if self.ended or self._opening:
                return
        if answer := self._zmtp.outgoing():
            self._put(answer)
        if self._events is None and not self.ended:  # that answer may have been one too many
            self._reserve()

    def _tell(self, event: ZmtpEvent) -> None:
        if type(event) is Received:
            hold = None
            if self._hold is not None:
                hold, self._hold = self._hold, None
                self._stop_timer()
            self._owner.received(self, event, hold)
        elif type(event) is LargeBox:
            self._open(event)
        elif type(event) is Handshaken:
            self.key = event.key
            self._owner.handshaken(self, event)
        elif isinstance(event, (Subscribed, Unsubscribed)):
            self._owner.subscribed(self, event)

    def _open(self, box: LargeBox) -> None:
        """Have a box opened, on another thread; its message is handed over after that."""
        self._opening = True
        self._watch()
        job = asyncio.get_running_loop().run_in_executor(self._shared.opener, self._open_here, box)
        job.add_done_callback(self._opened)

    def _open_here(self, box: LargeBox) -> None:
        if not self.ended:
            box.open()

    def _opened(self, done: asyncio.Future[None]) -> None:
        self._opening = False
        if not done.cancelled():
            done.exception()  # where it could not be opened, the connection's events say so
        if self.ended:
            self._stop_waiting()
            return
        self._watch()
        self._shared.poller.queue(self)

    def _reserve(self) -> None:
        """See to it that the rest of a large frame is read only when there is room for it."""
        wanted = self._zmtp.wanted
        size = self._zmtp.held + wanted if wanted else 0  # the same for as long as the same frame comes
        if self._hold is not None and self._hold.size != size:
            self._stop_waiting()  # that frame was none that is told of; the next one may have begun
        if self._hold is not None or wanted <= SMALL_FRAME:
            return
        self._late = 0
        self._hold = self._shared.reservations.ask(self.path, size, self._granted)
        if self._hold.granted:
            self._start_timer()
        else:
            self._watch()

    def _granted(self) -> None:
        self._start_timer()
        self._watch()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FRAME_SECONDS, self._overdue)

    def _overdue(self) -> None:
        """The frame's time is over. What is here unread, as kvd was late or paused, is not its sender's fault."""
        self._late += 1
        if self._late > FRAME_LATE or (self._events is None and not self._unread()):
            self.end("slow")
        else:
            self._start_timer()

    def _unread(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_waiting(self) -> None:
        self._stop_timer()
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold.release()

    def _watch(self) -> None:
        """Have the kernel tell of what is of use now."""
        if self.ended:
            return
        mask = (0 if self._waits() else READ) | (WRITE if self._outbox else 0)
        if mask != self._mask:
            self._mask = mask
            self._shared.poller.change(self._socket.fileno(), mask)

    def _put(self, buffer: bytes) -> None:
        """Send now what the kernel takes, and the rest later."""
        if self._outbox:
            self._keep(buffer)
            return
        try:
            sent = self._socket.send(buffer)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # the peer has closed: what it sent before is still read, and then the end is seen
        if sent < len(buffer):
            self._keep(buffer)
            self._sent_of_first = sent
            self._watch()

    def _keep(self, buffer: bytes) -> None:
        unsent = self._shared.unsent
        if not self._outbox:
            self._sent_of_first = 0
            self.unread_since = self.first_since = time.monotonic()
        self._outbox.append(buffer)
        self.unsent += len(buffer)
        unsent.add(self, buffer)
        if self.unsent > UNSENT_PAUSE_BYTES and not self._paused:
            self._paused = True
            self._watch()
        unsent.make_room()

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it."""
        if not self._outbox:
            return
        buffers = [self._outbox[at] for at in range(min(MOST_BUFFERS, len(self._outbox)))]
        parts: list[bytes | memoryview] = [memoryview(buffers[0])[self._sent_of_first :], *buffers[1:]]
        try:
            sent = self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.end("closed")
            return
        if sent:
            self.unread_since = time.monotonic()
        sent += self._sent_of_first
        for buffer in buffers:
            if sent < len(buffer):
                break
            sent -= len(buffer)
            self._outbox.popleft()
            self.unsent -= len(buffer)
            self._shared.unsent.remove(self, buffer)
            self.first_since = self.unread_since
        self._sent_of_first = sent
        if not self._outbox:
            del self._shared.unsent.waiting[self]
        if self._paused and self.unsent <= UNSENT_PAUSE_BYTES // 4:
            self._paused = False
            if self._events is not None:
                self._shared.poller.queue(self)
        self._watch()
