"""A lane's thread is woken when it wants to be, and others as ever."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from kvd.worker.host.timer_slack import sleep_precisely

PR_GET_TIMERSLACK = 30


def slack_ns() -> int:
    """How late this thread may be woken, in nanoseconds."""
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, *(ctypes.c_ulong(0) for _ in range(4))))


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_only_the_thread_that_asks_is_woken_precisely() -> None:
    found: list[int] = []

    def ask() -> None:
        sleep_precisely()
        found.append(slack_ns())

    before = slack_ns()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [1000]
    assert slack_ns() == before > 1000
