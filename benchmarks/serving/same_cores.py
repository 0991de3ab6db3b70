"""Engines of one role run on the same cores, whosever they are: steps take up to a fifth longer on some than on others.

Only one pair is asked at a time, so none is in another's way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.fleet import Pair
from kvctl.processes.tree import descendants
from tests.support.engine_pids import engine_pids

LEAST = 8
"""Cores of this process below which all stay where the system puts them."""


class Shares(NamedTuple):
    """Cores for prefilling engines, for decoding ones, and for all else."""

    prefill: list[int]
    decode: list[int]
    rest: list[int]


def shares(cores: Iterable[int]) -> Shares | None:
    """A quarter for each role, None of fewer than `LEAST`."""
    ordered = sorted(cores)
    quarter = len(ordered) // 4
    if len(ordered) < LEAST:
        return None
    return Shares(ordered[:quarter], ordered[quarter : 2 * quarter], ordered[2 * quarter :])


def place(pairs: Iterable[Pair]) -> None:
    """Move all that runs below this process to where its kind runs."""
    found = shares(os.sched_getaffinity(0))
    if found is None:
        return
    for pid in (os.getpid(), *descendants(os.getpid())):
        bind(pid, found.rest)
    for pair in pairs:
        for engine, cores in zip(pair.engines, (found.prefill, found.decode), strict=False):
            for pid in engine_pids(engine).all:
                bind(pid, cores)


def bind(pid: int, cores: Iterable[int]) -> None:
    """All threads of a process onto these: a new one stays with the one that starts it."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)
