"""Processes that stand still, and go on.

`os.kill` only asks for it: on a busy machine the last of an engine's fifty threads took its SIGSTOP 60 ms later, and
until then it served whoever read from it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def halted(pids: Iterable[int]) -> Iterator[None]:
    """They stand still within, and go on afterwards."""
    pids = tuple(pids)
    try:
        halt(*pids)
        yield
    finally:
        go_on(*pids)


def halt(*pids: int) -> None:
    """Stop these processes, and wait until the last of their threads stands still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    while not all(stands_still(pid) for pid in pids):
        time.sleep(1e-3)


def go_on(*pids: int) -> None:
    """Let them go on; one that was killed meanwhile is no error."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    return all(_state(task) in "TXZ" for task in Path(f"/proc/{pid}/task").iterdir())


def _state(task: Path) -> str:
    """The letter for what a thread does: T when it is stopped, X when it is no more."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
