"""Short sleeps that are short: Linux wakes a thread up to 50 us late unless it is told what the thread minds."""

from __future__ import annotations

import ctypes
import sys

_SET, _GET = 29, 30  # PR_SET_TIMERSLACK, PR_GET_TIMERSLACK
_SLACK_NS = 1000


def sleep_precisely() -> None:
    """Have this thread woken within some microseconds of its time. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        _prctl(_SET, _SLACK_NS)


def slack_ns() -> int:
    """How late this thread may be woken, in nanoseconds. Linux only."""
    return _prctl(_GET, 0)


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *(ctypes.c_ulong(0) for _ in range(3))))
