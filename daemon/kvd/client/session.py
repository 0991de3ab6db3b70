"""A worker's or a scheduler's lasting session with its kvd: one thread, one socket, nothing that blocks the caller.

The session is level-triggered. It keeps no record of what kvd knows; whenever the connection, kvd's generation or kvd's
own word says that kvd does not know us, the card is asked for again and sent. Whatever must not get lost is kept here
until kvd has answered it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from kvd.client.alarm import Alarm
from kvd.client.errors import ClientError, TimedOut
from kvd.client.mailbox import QUEUE, Fresh, Mailbox, MakeCard, OnPush, Pending, SessionState
from kvd.client.session_thread import SessionThread
from kvd.shown import logger
from kvd.wire.frame import Message
from kvd.wire.names import runtime_dir, socket_address

__all__ = ["KvdSession", "SessionState"]

log = logger(__name__)


class KvdSession:
    """A client's session with its kvd. The public methods may be called from any thread and never wait for I/O.

    ``card`` is called on the session's thread whenever kvd has to be told who we are. ``on_push`` gets what kvd sends
    unasked, on the session's thread, so it must be quick. What it returns for a request of kvd's (`LeaseExtend`, the
    messages of `kvd.wire.push`) is sent back as the answer. None and an exception are sent back as a refusal.
    ``directory`` is the runtime directory of kvd, ``name`` stands in log lines.

    The thread starts at once. After a fork make a new session: an inherited one refuses every call.
    """

    def __init__(
        self,
        card: MakeCard,
        on_push: OnPush | None = None,
        *,
        directory: str | Path | None = None,
        name: str = "kvd-session",
    ) -> None:
        self._mailbox = Mailbox(
            address=socket_address(runtime_dir(None if directory is None else str(directory))),
            name=name,
            card=card,
            on_push=on_push,
            wake=os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),
            alarm=Alarm(),
        )
        self._pid = os.getpid()
        self._side = SessionThread(self._mailbox)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def counters(self) -> Counter[str]:
        """What happened so far, by name: ``dropped``, ``connections``, ``errors`` ... Only ever grows."""
        return self._mailbox.counters

    @property
    def state(self) -> SessionState:
        """The newest state: an immutable value, read without a lock."""
        return self._mailbox.state

    def wait(self, until: Callable[[SessionState], bool], timeout: float) -> SessionState:
        """Wait until the state is as wanted, at most ``timeout`` seconds. Raises `TimedOut`, with the state."""
        with self._mailbox.changed:
            if not self._mailbox.changed.wait_for(lambda: until(self._mailbox.state), timeout):
                refusal = self._mailbox.state.refusal
                why = f"kvd refused: {refusal.message}" if refusal else f"state is {self._mailbox.state}"
                raise TimedOut(f"{self._mailbox.name}: not as awaited within {timeout:g} s: {why}")
            return self._mailbox.state

    def call(self, message: Message, timeout: float) -> Future[Message]:
        """Ask; the future gets the answer, or `RefusedByDaemon`, `TimedOut`, `Unreachable` after ``timeout`` seconds.

        A call that is still wanted when the connection comes back is sent again: every request of the wire may be
        repeated. Where too many wait already the future holds a `ClientError` at once.
        """
        pending = Pending(message, Future(), time.monotonic() + timeout, timeout)
        return pending.future if self._sent_now(pending) else self._put(pending)

    def deliver(
        self, key: str, message: Fresh, keep_seconds: float = 600.0, *, after: float = 0.0
    ) -> Future[Message]:
        """Send at least once: keep ``message`` under ``key`` and repeat it until kvd gave an answer that is no refusal.

        A refusal that is ``final`` ends it too: the future holds `RefusedByDaemon`.
        A newer message under the same key replaces the older one. A callable is called for each sending, on this thread
        or the session's, so that durations in it are fresh; it must not wait. After ``keep_seconds`` it is dropped,
        counted and logged, and the future holds the reason; nobody needs to look at the future. It is not sent before
        ``after`` seconds, and this session's thread is not woken before that.
        """
        now = time.monotonic()
        pending = Pending(message, Future(), now + keep_seconds, keep_seconds, key, due=now + after)
        if not after and self._sent_now(pending):
            return pending.future
        return self._put(pending)

    def close(self, timeout: float = 2.0) -> None:
        """Say goodbye and end the thread, within ``timeout`` seconds. Whatever still waits fails. Idempotent."""
        if self._pid != os.getpid():
            return
        self._mailbox.end()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._mailbox.ended()

    def _sent_now(self, pending: Pending) -> bool:
        return self._pid == os.getpid() and self._side.send_now(pending)

    def _put(self, pending: Pending) -> Future[Message]:
        ours = self._pid == os.getpid()
        if ours and self._mailbox.post(pending):
            return pending.future
        if self._mailbox.closing or not ours:
            why = "is closed" if ours else f"belongs to process {self._pid}, this is {os.getpid()}"
            pending.future.set_exception(ClientError(f"the session {why}", hint="make a new KvdSession"))
        else:
            self._mailbox.counters["dropped"] += 1
            pending.future.set_exception(
                ClientError(f"{QUEUE} messages wait already for kvd at {self._mailbox.address}")
            )
        return pending.future

    def _run(self) -> None:
        thread = self._side
        try:
            while not self._mailbox.closing:
                try:
                    thread.turn()
                except Exception:  # a fault of ours: a worker that never hears from kvd again would be worse
                    self._mailbox.counters["errors"] += 1
                    log.exception("%s: a turn of the session failed; going on", self._mailbox.name)
                    time.sleep(0.05)  # a cause that stays must not spin
            thread.goodbye()
        except Exception:  # the engine is ending, and must not hang or fail for a farewell
            log.exception("%s: the goodbye failed", self._mailbox.name)
        finally:
            thread.close()
            self._mailbox.publish(replace(self._mailbox.state, connected=False))
