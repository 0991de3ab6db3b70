"""kvd asks itself, as a client would, whether it serves; the service manager's watchdog is fed with the answers.

A thread of its own does it. So a loop that stands still, or spins, is noticed also where no service manager runs.

| what is looked at | where it fails |
|---|---|
| a heartbeat over the local socket is answered | the watchdog is not fed; after 6 failures in a row kvd ends |
| the threads that kvd has for good | kvd ends |
| the runtime directory and its sockets are those that this kvd made | kvd ends: new clients would not find it |

Not the ledger: another start would not mend a disk that hangs, and kvd serves all else without it (`Ledger.watch`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvd.service.ending import end_now
from kvd.service.notify import Notifier
from kvd.service.runtime_directory import RuntimeDirectory
from kvd.wire.errors import WireError
from kvd.wire.frame import decode, encode
from kvd.wire.names import SOCKET_NAME
from kvd.wire.registration import Heartbeat, NotRegistered
from kvd.zmtp.connection import Connection, ConnectionLimits
from kvd.zmtp.errors import ZmtpError
from kvd.zmtp.events import Handshaken, Received
from kvd.zmtp.null import Null

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
"""How often all is looked at; more often where the watchdog wants it."""
ASK_SECONDS = 5.0
"""How often kvd is asked, at least, and how long its answer may take."""
FAILURES = 6
"""So many in a row end kvd. Not a time: a process that was stopped for an hour has failed once."""
NOBODY = "kvd itself"
LIMITS = ConnectionLimits(message=1 << 16)


class SelfCheck:
    """What one kvd asks itself. `running` does it. ``threads`` gives those that never end."""

    def __init__(
        self,
        directory: RuntimeDirectory,
        notifier: Notifier,
        threads: Callable[[], Sequence[threading.Thread]] = tuple,
    ) -> None:
        self.failures = 0
        """Checks in a row that found kvd not serving."""
        self._directory = directory
        self._notifier = notifier
        self._threads = threads
        self._stop = threading.Event()
        self._client: LocalClient | None = None
        feeding = notifier.watchdog_seconds / 3 or ASK_SECONDS
        self._ask_every = min(feeding, ASK_SECONDS)
        self._every = min(EVERY_SECONDS, self._ask_every)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Check until the end of the block; a fault of kvd's ends the process."""
        thread = threading.Thread(target=self._run, name="kvd-self-check", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            if (client := self._client) is not None:
                client.interrupt()
            thread.join(EVERY_SECONDS)

    def _run(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            self._look()
            if time.monotonic() >= due:
                due = time.monotonic() + self._ask_every
                self._ask()
            self._stop.wait(self._every)

    def _look(self) -> None:
        """End kvd where a part of it is gone."""
        if why := self._directory.lost():
            end_now(f"{why}; new clients cannot reach it")
        for thread in self._threads():
            if not thread.is_alive():
                end_now(f"its thread {thread.name} ended")

    def _ask(self) -> None:
        why = self._unanswered()
        if self._stop.is_set():
            return
        if not why:
            self.failures = 0
            self._notifier.watchdog()
            return
        self.failures += 1
        log.warning("kvd does not serve, %d of %d: %s", self.failures, FAILURES, why)
        if self.failures >= FAILURES:
            end_now(f"it serves nobody: {why}")

    def _unanswered(self) -> str:
        """Why a client's heartbeat got no answer, or nothing."""
        try:
            if self._client is None:
                self._client = LocalClient(self._directory)
            self._client.ask(time.monotonic() + ASK_SECONDS)
        except (OSError, ZmtpError, WireError, EOFError) as error:
            if self._client is not None:
                self._client.close()
            self._client = None
            return f"{type(error).__name__}: {error}"
        return ""


class LocalClient:
    """A connection to this kvd's own local socket, for one question at a time."""

    def __init__(self, directory: RuntimeDirectory) -> None:
        self._zmtp = Connection("DEALER", Null(), LIMITS)
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._correlation = 0
        self._stream.settimeout(ASK_SECONDS)
        try:
            self._stream.connect(os.fspath(directory.path / SOCKET_NAME))
            self._stream.sendall(self._zmtp.start())
        except OSError:
            self._stream.close()
            raise

    def ask(self, until: float) -> None:
        """A heartbeat of nobody; raises `OSError`, `EOFError`, `ZmtpError` or `WireError` where it is not answered."""
        while not self._zmtp.ready:
            self._receive(until)
        self._correlation += 1
        frame = encode(Heartbeat(incarnation=NOBODY), self._correlation)
        self._stream.sendall(b"".join(self._zmtp.message(frame)))
        while True:
            for body in self._receive(until):
                message, correlation = decode(body)
                if correlation == self._correlation:
                    if not isinstance(message, NotRegistered):
                        raise OSError(f"a heartbeat of nobody is answered with {message}")
                    return

    def interrupt(self) -> None:
        """Have `ask` raise now, on whatever thread it runs."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _receive(self, until: float) -> list[bytes]:
        """Messages that came, perhaps none."""
        self._stream.settimeout(max(0.001, until - time.monotonic()))
        data = self._stream.recv(1 << 16)
        if not data:
            raise EOFError("kvd closed the connection")
        found = [event for event in self._zmtp.receive(data) if not isinstance(event, Handshaken)]
        if out := self._zmtp.outgoing():
            self._stream.sendall(out)
        return [event.body for event in found if isinstance(event, Received)]
