"""A worker process and the pipes to it: commands as JSON lines on stdin, one JSON line on stdout answers each."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvctl.processes import tied
from kvctl.processes.errors import WorkerFailed
from kvctl.processes.spawn import log_tail, spawn

ANSWER_SECONDS = 60.0


@dataclass(slots=True)
class WorkerProcess:
    """A worker and the pipes to it. `ask` may be called from any thread; commands are obeyed in turn."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    unread: bytes = b""

    def ask(self, *, patience: float = ANSWER_SECONDS, **command: Any) -> dict[str, Any]:
        """Give a command and wait ``patience`` seconds for its answer. Raises `WorkerFailed`."""
        with self.lock:
            self.give(command)
            answer = self.answer(patience)
        return good(self.name, answer)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer, at most ``timeout`` seconds from now. Raises `WorkerFailed`."""
        out, until = self.process.stdout, time.monotonic() + timeout
        assert out is not None  # noqa: S101 - it was opened as a pipe
        while b"\n" not in self.unread:
            left = max(0.0, until - time.monotonic())
            if not select.select([out], [], [], left)[0]:
                raise WorkerFailed(
                    f"{self.name} did not answer within {timeout:g} s{log_tail(self.log_path)}"
                )
            more = os.read(out.fileno(), 1 << 16)
            if not more:
                raise WorkerFailed(
                    f"{self.name} ended with status {self.process.wait()}{log_tail(self.log_path)}"
                )
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def dismiss(self) -> None:
        """No more commands: it ends once it has seen that."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def end(self, timeout: float) -> None:
        """Wait for its end at most ``timeout`` seconds, then end it by force."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def give(self, command: dict[str, Any]) -> None:
        """Write a command; `answer` has its answer. Raises `WorkerFailed`."""
        pipe = self.process.stdin
        assert pipe is not None  # noqa: S101 - it was opened as a pipe
        try:
            pipe.write(json.dumps(command).encode() + b"\n")
            pipe.flush()
        except (OSError, ValueError):
            raise WorkerFailed(f"{self.name} takes no commands any more{log_tail(self.log_path)}") from None


def start_worker(name: str, module: str, log_path: Path, environment: Mapping[str, str]) -> WorkerProcess:
    """Start a module that takes commands, tied to this thread; it runs on one core, in its log's folder.

    ``environment`` comes on top of this process's own.
    """
    folder = log_path.parent
    whole = dict(os.environ) | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"} | dict(environment)
    pipe = subprocess.PIPE
    process = spawn(tied.command(module), log_path, whole, stdin=pipe, stdout=pipe, cwd=folder)
    return WorkerProcess(name, process, log_path)


class Ending(Protocol):
    """A process that ends when it is told, here or on another host."""

    def dismiss(self) -> None:
        """No more commands: it is to end."""

    def end(self, timeout: float) -> None:
        """Wait for its end at most ``timeout`` seconds, then end it by force."""


def end_all(
    processes: Iterable[Ending], seconds: float, kind: type[BaseException] | None, *_: object
) -> None:
    """End all: in order, or at once after an exception. What they hold is memory, which needs no farewell.

    With the first two given it is what an `ExitStack` calls.
    """
    processes = list(processes)
    for process in processes:
        process.dismiss()
    for process in processes:
        process.end(seconds if kind is None else 0.0)


def good(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer of the process ``name``. Raises `WorkerFailed` where it says that the command failed."""
    if "error" in answer:
        raise WorkerFailed(f"{name}: {answer['error']}")
    return answer
