"""The daemon's log, written by a thread of its own: a pipe that nobody reads, or a stalled disk, stops nothing else.

Ids in it are chosen by others. A record is one line, whatever stands in an id, and so is where an error comes from.

Where systemd's journal reads it, each line says how severe it is, so that `journalctl -p warning` finds it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvd.shown import MAX_LINE, MAX_MESSAGE, cut, escaped

MOST_LINES = 8192
"""Lines that wait to be written; what comes beyond them is dropped and counted."""
SEVERITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Levels of `logging`, from the highest, and syslog's number for each."""
MOST_BYTES = 4 << 20
"""Bytes of such lines."""
FAULT_CODE = "KVD-INTERNAL"
"""The code of an error that was logged without ``extra={"code": ...}``: nobody has foreseen it."""
MOST_CALLS = 16
"""Calls that are told of an error, the innermost ones."""
MOST_CAUSES = 4
"""Errors that are told of: an error, what caused it, and so on."""
LAST_SECONDS = 1.0
"""How long the end of the daemon waits for the last lines."""


class OneLine(logging.Formatter):
    """A record as one line. An error stands behind its message, with the calls that led to it, the innermost first."""

    def format(self, record: logging.LogRecord) -> str:
        """The line: `MAX_LINE` characters of the message, and as many of the error."""
        before, record.exc_text = record.exc_text, None  # as another handler has put it, in many lines
        try:
            return (
                super().format(record).replace("\n", "; ")
            )  # what stands between its parts: each is one line
        finally:
            record.exc_text = before

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """The message, with its control characters written out, and the code that `kvctl explain` takes."""
        code = getattr(record, "code", FAULT_CODE if record.levelno >= logging.ERROR else "")
        record.message = escaped(cut(record.message, MAX_LINE)) + (f" [{code}]" if code else "")
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 (logging's name)
        """Local time as in ISO 8601, with its offset: logs of hosts in other zones can be laid beside each other."""
        local = datetime.fromtimestamp(record.created, UTC).astimezone()
        return local.strftime(datefmt) if datefmt else local.isoformat(timespec="milliseconds")

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        """The error, and what caused it."""
        told: list[str] = []
        error: BaseException | None = ei[1]
        while error is not None and len(told) < MOST_CAUSES:
            told.append(_with_calls(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return escaped(cut("Traceback: " + ", caused by ".join(told), MAX_LINE))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (logging's name)
        """The calls of a record that has no error."""
        return escaped(cut(stack_info, MAX_LINE))


def _with_calls(error: BaseException) -> str:
    calls = [
        f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    more = [f"{len(calls) - MOST_CALLS} more"] if len(calls) > MOST_CALLS else []
    what = cut("".join(traceback.format_exception_only(error)).strip(), MAX_MESSAGE)
    return f"{what} ({' < '.join([*reversed(calls[-MOST_CALLS:]), *more])})"


class Writer(logging.Handler):
    """Formats records where they are logged, and writes them on a thread that may block for as long as it must.

    It writes to the file descriptor, past Python's buffered files: what they hold locked while they block, the end of
    the interpreter would wait for.
    """

    def __init__(
        self, descriptor: int, text: str, most: int = MOST_LINES, most_bytes: int = MOST_BYTES
    ) -> None:
        super().__init__()
        self.setFormatter(OneLine(text))
        self.dropped = 0
        self._most_bytes = most_bytes
        # Bytes: the first is of those who log, under their lock, the second of the thread.
        self._taken = self._written = 0
        self._descriptor = descriptor
        self._mark = marking(descriptor)
        self._lines: queue.Queue[bytes | None] = queue.Queue(most)
        self.thread = threading.Thread(target=self._write, name="kvd-log", daemon=True)
        self.thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the line over; never waits."""
        try:
            text = self._mark(record.levelno, self.format(record))
            line = f"{text}\n".encode(errors="backslashreplace")
            if self._taken - self._written + len(line) > self._most_bytes:
                self.dropped += 1
                return
            self._lines.put_nowait(line)
            self._taken += len(line)
        except queue.Full:
            self.dropped += 1
        except Exception:  # noqa: BLE001 (arguments that do not fit their text: logging says which, and goes on)
            self.handleError(record)

    def close(self) -> None:
        """Write what waits, for `LAST_SECONDS` twice at most."""
        self.finish()
        super().close()

    def finish(self) -> None:
        """The same on any thread, that which writes included, before the process ends."""
        if threading.current_thread() is self.thread:
            with contextlib.suppress(queue.Empty):
                while line := self._lines.get_nowait():
                    _write_all(self._descriptor, line)
            return
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=LAST_SECONDS)
        self.thread.join(LAST_SECONDS)

    def _write(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            try:
                _write_all(self._descriptor, line)
            except MemoryError:  # one line, not the log
                self.dropped += 1
            self._written += len(line)
            if told != (dropped := self.dropped):
                lost = self._mark(logging.WARNING, f"kvd: {dropped - told} lines of this log were lost")
                _write_all(self._descriptor, f"{lost}\n".encode())
                told = dropped


@contextlib.contextmanager
def writing(descriptor: int, text: str) -> Iterator[None]:
    """All logging of the process goes to ``descriptor``, formatted as ``text`` says."""
    writer = Writer(descriptor, text)
    logging.basicConfig(handlers=[writer], level=logging.WARNING)
    try:
        yield
    finally:
        writer.close()


def to_journal(descriptor: int) -> bool:
    """Whether it is the stream to the journal that systemd names in ``$JOURNAL_STREAM``; children may inherit that."""
    try:
        stream = os.fstat(descriptor)
    except OSError:  # closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


def marking(descriptor: int) -> Callable[[int, str], str]:
    """What puts a level of `logging` before a line, for the journal; elsewhere it leaves lines alone."""
    return _marked if to_journal(descriptor) else lambda _, text: text


def _marked(level: int, text: str) -> str:
    """The line as in sd-daemon(3), which the journal takes the severity off."""
    severity = next((number for least, number in SEVERITIES if level >= least), 7)
    return f"<{severity}>{text}"


def dropped() -> int:
    """Lines of this process that could not be written in time."""
    return sum(writer.dropped for writer in writers())


def writers() -> list[Writer]:
    """Those that write this process's log."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, Writer)]


def _write_all(descriptor: int, text: bytes) -> None:
    # Where nobody will ever read there is nobody to tell either.
    with contextlib.suppress(OSError):
        while text:
            try:
                text = text[os.write(descriptor, text) :]
            except BlockingIOError:
                select.select([], [descriptor], [])
