"""What peers' reads cost an engine: processor time of those who move bytes that others waited for."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.worker.host.toll import IDLE_SECONDS, LOOK_SECONDS, Toll

MOVER, OTHER, NEW = 1, 2, 3
MS = 1_000_000


class Process:
    """Threads by number, and what Linux says of each; looked at every `LOOK_SECONDS`, a step all the time."""

    def __init__(self, tasks: Path) -> None:
        self.tasks = tasks
        self.toll = Toll(frozenset({MOVER}), tasks)
        self.now = 100.0

    def tells(self, thread: int, ran: int, waited: int) -> None:
        folder = self.tasks / str(thread)
        folder.mkdir(exist_ok=True)
        (folder / "schedstat").write_text(f"{ran * MS} {waited * MS} 1\n")

    def look(self, after: float = LOOK_SECONDS, idle: float = 0.0) -> float:
        self.toll.step(self.now + idle)
        self.now += idle + after
        return round(self.toll.look(self.now) * 1000)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    found = Process(tmp_path)
    found.tells(MOVER, 10, 5)
    found.tells(OTHER, 1000, 100)
    assert found.look() == 0, "what was before the first look is nobody's cost"
    return found


@pytest.mark.parametrize(
    ("ran", "waited", "cost"),
    [(20, 30, 20), (20, 5, 5), (20, 0, 0), (0, 30, 0)],
    ids=[
        "all of it",
        "a processor was free for the rest",
        "one was free for all",
        "others had the processors",
    ],
)
def test_it_is_what_was_run_for_peers_and_waited_for(
    process: Process, ran: int, waited: int, cost: int
) -> None:
    process.tells(MOVER, 10 + ran, 5)
    process.tells(OTHER, 1000, 100 + waited)
    assert process.look() == cost
    assert process.look() == 0, "once"


def test_what_a_thread_waited_before_it_was_seen_does_not_count(process: Process) -> None:
    process.tells(MOVER, 30, 5)
    process.tells(NEW, 0, 500)
    assert process.look() == 0


def test_an_engine_that_was_idle_waited_for_nothing(process: Process) -> None:
    process.tells(MOVER, 30, 5)
    process.tells(OTHER, 1000, 200)
    assert process.look(idle=2 * IDLE_SECONDS) == 0
    process.tells(MOVER, 50, 5)
    process.tells(OTHER, 1000, 300)
    assert process.look(after=1.0) == 20, "a step may take long"


def test_it_looks_now_and_then(process: Process) -> None:
    process.tells(MOVER, 30, 5)
    process.tells(OTHER, 1000, 200)
    assert process.look(after=LOOK_SECONDS / 4) == 0
    assert process.look() == 20


def test_where_linux_does_not_tell_it_costs_nothing(tmp_path: Path) -> None:
    for tasks in (tmp_path, tmp_path / "none"):
        toll = Toll(frozenset({MOVER}), tasks)
        assert [toll.look(100.0), toll.look(101.0)] == [0.0, 0.0]


@pytest.fixture
def one_processor() -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("one_processor")
def test_real_threads_on_one_processor() -> None:
    ends, numbers, data = threading.Event(), list[int](), bytes(1 << 20)

    def work() -> None:
        numbers.append(threading.get_native_id())
        while not ends.is_set():
            hashlib.sha256(data)  # without the GIL

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(numbers) < 2:
        time.sleep(0.001)
    try:
        toll, began, cost = Toll(frozenset(numbers[:1])), time.monotonic(), 0.0
        while cost == 0.0 and time.monotonic() < began + 30.0:
            time.sleep(0.01)
            toll.step(now := time.monotonic())
            cost = toll.look(now)
        assert 0.0 < cost < time.monotonic() - began
    finally:
        ends.set()
        for thread in threads:
            thread.join()
