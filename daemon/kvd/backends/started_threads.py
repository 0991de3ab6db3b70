"""Which threads of this process a transfer engine starts: they run without a word to Python, and under no name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TASKS = "/proc/self/task"


def threads_started(start: Callable[[], T]) -> tuple[T, frozenset[int]]:
    """What ``start`` gives, and the system's ids of the threads that came meanwhile and are none of Python's.

    Nothing else may start such threads meanwhile. On systems without /proc there are none.
    """
    before = _threads()
    started = start()
    return started, _threads() - before - {one.native_id for one in threading.enumerate()}


def _threads() -> frozenset[int]:
    try:
        return frozenset(int(one.name) for one in Path(TASKS).iterdir())
    except OSError:
        return frozenset()
