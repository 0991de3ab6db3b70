"""The timer that is set without waking whoever waits for it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from kvd.client.alarm import Alarm

LONG = 3600.0
SOON = 0.02


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.close()


def rings(alarm: Alarm, seconds: float = 0.0) -> bool:
    """Whether it rings within so many seconds."""
    return bool(select.select([alarm.fileno()], [], [], seconds)[0])


def test_it_rings_at_its_time_and_not_before(alarm: Alarm) -> None:
    at = time.monotonic() + SOON
    alarm.by(at)
    alarm.wait()
    assert time.monotonic() >= at
    assert not rings(alarm), "it rang once"


def test_the_earliest_time_counts(alarm: Alarm) -> None:
    alarm.by(time.monotonic() + LONG)
    alarm.by(time.monotonic() + SOON)
    alarm.by(time.monotonic() + LONG)
    assert rings(alarm, 10.0)


@pytest.mark.parametrize("ago", [0.0, 1.0, 1e9])
def test_a_time_that_has_passed_rings_at_once(alarm: Alarm, ago: float) -> None:
    alarm.by(time.monotonic() - ago)
    assert rings(alarm, 10.0)


def test_what_is_set_after_it_rang_rings_again(alarm: Alarm) -> None:
    for _ in range(2):
        alarm.now()
        alarm.wait()
    alarm.by(time.monotonic() + LONG)
    assert not rings(alarm)


def test_what_is_set_while_another_thread_forgets_rings(
    alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = threading.Thread(target=alarm.now)
    read = os.read

    def interrupted(fd: int, size: int) -> bytes:
        other.start()
        other.join(0.2)  # it is done by now where nothing keeps it out
        return read(fd, size)

    monkeypatch.setattr("kvd.client.alarm.os.read", interrupted)
    alarm.rung()
    monkeypatch.undo()
    other.join()
    alarm.now()
    assert rings(alarm, 1.0)


def test_to_forget_one_that_has_not_rung_waits_for_nothing(alarm: Alarm) -> None:
    alarm.by(time.monotonic() + LONG)
    alarm.rung()
    alarm.by(time.monotonic() + 2 * LONG)
    assert not rings(alarm)
    alarm.now()
    assert rings(alarm, 10.0)


def test_it_ends_the_wait_of_another_thread(alarm: Alarm) -> None:
    thread = threading.Thread(target=alarm.wait)
    thread.start()
    alarm.now()
    thread.join(10.0)
    assert not thread.is_alive()


def test_one_that_is_closed_can_be_set_and_closed(alarm: Alarm) -> None:
    alarm.close()
    alarm.now()
    alarm.close()
    assert alarm.fileno() == -1
