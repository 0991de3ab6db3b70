"""Many hosts asked side by side, by one deadline: who does not answer is named, and not waited for."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from kvctl.errors import KvctlError

FLEET_SECONDS = 1.5
"""Within which a fleet answers, where nobody asked for another time: from kvctl's start, which takes a part of it."""
LEAST_SECONDS = 1.0
"""That hosts have in any case: also where kvctl's own start took long, and each time that --watch asks."""
STACK_BYTES = 512 << 10
"""Of a thread that asks: there is one for each host."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class NotAnswered:
    """A host that gave no answer, and why."""

    host: str
    error: KvctlError


@dataclass(frozen=True)
class FleetAnswers(Generic[Answer]):
    """The answers by host, in the order in which hosts were named, and the hosts that gave none."""

    answers: Mapping[str, Answer]
    missing: tuple[NotAnswered, ...]


def seconds_for_hosts(running: float) -> float:
    """How long hosts have to answer a kvctl that has been running for so many seconds."""
    return max(LEAST_SECONDS, FLEET_SECONDS - running)


def running_seconds() -> float:
    """How long this process has been running, as the kernel knows it, to 10 ms."""
    started = int(
        Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    )
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def side_by_side(asked: Mapping[str, Callable[[], Answer]], deadline: float) -> FleetAnswers[Answer]:
    """Ask all at once, each on a thread of its own, until ``deadline`` in monotonic seconds.

    What a host raises but `KvctlError` is raised here: it is a fault of kvctl's.
    """
    came: queue.Queue[tuple[str, Answer | Exception]] = queue.Queue()

    def ask(host: str, question: Callable[[], Answer]) -> None:
        try:
            came.put((host, question()))
        except Exception as error:  # noqa: BLE001 (whatever it is, who asked hears of it)
            came.put((host, error))

    before = threading.stack_size(STACK_BYTES)
    try:
        for host, question in asked.items():
            # Nobody waits for them: one may hang in the look-up of a name for longer than any deadline.
            threading.Thread(target=ask, args=(host, question), name=f"kvctl-{host}", daemon=True).start()
    finally:
        threading.stack_size(before)
    answers: dict[str, Answer] = {}
    failed: dict[str, KvctlError] = {}
    while len(answers) + len(failed) < len(asked):
        try:
            host, answer = came.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, KvctlError):
            failed[host] = answer
        elif isinstance(answer, Exception):
            raise answer
        else:
            answers[host] = answer
    late = KvctlError("it did not answer in time", "", "KVD-TIMEOUT")
    return FleetAnswers(
        {host: answers[host] for host in asked if host in answers},
        tuple(NotAnswered(host, failed.get(host, late)) for host in asked if host not in answers),
    )
