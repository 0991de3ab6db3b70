"""The watcher looks when told to, when something is due, and not otherwise."""

from __future__ import annotations

import logging
import math
import queue
import time

import pytest

from kvd.worker import watchdog as watch
from kvd.worker.watchdog import Watch


def test_it_looks_when_it_is_told_to_and_when_it_is_due() -> None:
    looks: queue.Queue[float] = queue.Queue()
    due = [time.monotonic() + 0.02, math.inf]

    def look(now: float) -> float:
        looks.put(now)
        return due.pop(0) if due else math.inf

    one = Watch(look)
    one.by(time.monotonic())
    first, second = looks.get(timeout=10), looks.get(timeout=10)
    assert second - first >= 0.01
    one.by(later := time.monotonic() + 0.02)
    assert looks.get(timeout=10) >= later
    one.by(time.monotonic() + 3600.0)
    one.close()
    assert looks.empty(), "nobody is woken before it is due"
    one.by(0.0)  # of no use to anybody now


def test_a_look_that_fails_is_logged_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "AFTER_ERROR", 0.01)
    looks: queue.Queue[float] = queue.Queue()

    def look(now: float) -> float:
        looks.put(now)
        if looks.qsize() == 1:
            raise RuntimeError("boom")
        return math.inf

    with caplog.at_level(logging.ERROR):
        one = Watch(look)
        one.by(0.0)
        while looks.qsize() < 2:
            time.sleep(0)
        one.close()
    assert "it goes on" in caplog.text
