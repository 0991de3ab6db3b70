"""A lane's thread is woken when it wants to be, and others as ever."""

from __future__ import annotations

import sys
import threading

import pytest

from kvd.worker.timer_slack import slack_ns, sleep_precisely


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
