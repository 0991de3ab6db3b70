"""Starts a process that has a log, and reads the end of that."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

LOG_LINES_IN_ERRORS = 25


class Spawned(Protocol):
    """A process that was started: the part of `subprocess.Popen` that an engine's owner needs."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """Its exit status, -N where signal N ended it; None until `wait` has returned."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; raises `subprocess.TimeoutExpired` after ``timeout`` seconds."""


class Spawn(Protocol):
    """A function like `spawn`."""

    def __call__(
        self, command: Sequence[str], log_path: Path, environment: Mapping[str, str], **more: Any
    ) -> Spawned:
        """Start a process."""


def spawn(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str], **more: Any
) -> subprocess.Popen[bytes]:
    """Start a process that reads nothing and writes to a log; ``more`` are arguments of Popen.

    Ctrl-C at a terminal reaches this process alone, which then ends that one in order.
    """
    with log_path.open("ab") as log:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log} | more
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def log_tail(path: Path) -> str:
    """What an error says of a process's log: its last lines, nothing where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(["; the end of its log:", *(f"  {line}" for line in lines[-LOG_LINES_IN_ERRORS:])])
