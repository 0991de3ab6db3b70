"""Short sleeps that are short: Linux wakes a thread up to 50 us late unless it is told what the thread minds."""

from __future__ import annotations

import ctypes
import sys

_SET_TIMERSLACK = 29  # PR_SET_TIMERSLACK
_SLACK_NS = 1000


def sleep_precisely() -> None:
    """Have this thread woken within some microseconds of its time. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        unused = (ctypes.c_ulong(0) for _ in range(3))
        ctypes.CDLL(None).prctl(_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), *unused)
