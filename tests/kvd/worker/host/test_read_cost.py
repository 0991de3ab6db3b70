"""What peers' reads cost a worker: processor time of those who move bytes that others waited for."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.worker.host.read_cost import IDLE_SECONDS, QUIET_SECONDS, ReadCost

SERVING, OTHER, NEW = 1, 2, 3
STEP = 0.25
MS = 1_000_000


class Process:
    """Threads by number, and what Linux says of each. It makes steps all the time."""

    def __init__(self, tasks: Path) -> None:
        self.tasks = tasks
        self.cost = ReadCost(frozenset({SERVING}), str(tasks))
        self.now = 1000.0
        self.times = {SERVING: (0, 0), OTHER: (0, 0)}
        self.passes()

    def passes(self, ran: int = 0, waited: int = 0, *, thread: int = OTHER) -> None:
        """So many milliseconds were run for peers, and waited by another thread."""
        self._tell(SERVING, ran, 0)
        self._tell(thread, 0, waited)

    def _tell(self, thread: int, ran: int, waited: int) -> None:
        before = self.times.get(thread, (0, 0))
        self.times[thread] = (before[0] + ran, before[1] + waited)
        folder = self.tasks / str(thread)
        folder.mkdir(exist_ok=True)
        (folder / "schedstat").write_text("{} {} 1\n".format(*(one * MS for one in self.times[thread])))

    def looked(self, *, step: float = STEP, idle: float = 0.0) -> int:
        """Milliseconds, after a step that took so long."""
        self.cost.step(self.now + idle)
        self.now += idle + step
        return round(self.cost.look(self.now) * 1000)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """One that is being read for some time."""
    found = Process(tmp_path)
    found.looked()
    found.passes(20, 1000)
    assert found.looked() == 0, "what was before the first look is nobody's cost"
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
    process.passes(ran, waited)
    assert process.looked() == cost
    assert process.looked() == 0, "once"


def test_what_a_thread_waited_before_it_was_seen_does_not_count(process: Process) -> None:
    process.passes(20, 500, thread=NEW)
    assert process.looked() == 0


def test_what_was_waited_before_a_read_does_not_count(process: Process) -> None:
    for _ in range(100):
        process.passes(0, 10)
        assert process.looked() == 0
    process.passes(50, 0)
    assert process.looked() == 0
    process.passes(50, 50)
    assert process.looked() == 50


def test_reads_that_come_now_and_then_count(process: Process) -> None:
    cost = 0
    for number in range(40):
        process.passes(*((20, 20) if number % 4 == 0 else (0, 0)))
        cost += process.looked()
    assert cost == 200


def test_nobody_else_is_looked_at_where_nothing_is_read(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.looked(step=QUIET_SECONDS)
    process.looked()
    monkeypatch.setattr(os, "listdir", lambda _: pytest.fail("all threads are looked at"))
    for _ in range(50):
        process.looked()


def test_an_engine_that_was_idle_waited_for_nothing(process: Process) -> None:
    process.passes(20, 100)
    assert process.looked(idle=2 * IDLE_SECONDS) == 0
    process.passes(90, 100)
    assert process.looked(step=5.0) == 90, "a step may take long"


def test_a_device_may_compute_between_what_a_connector_sees_of_two_steps(process: Process) -> None:
    process.passes(20, 100)
    assert process.looked(step=0.01, idle=IDLE_SECONDS / 2) == 20


def test_what_a_thread_of_the_transfer_engine_runs_by_itself_is_no_read(process: Process) -> None:
    process.looked(step=QUIET_SECONDS)
    cost = 0
    for _ in range(100):
        process.passes(3, 100)
        cost += process.looked(step=1.0)
    assert cost == 0


def test_a_thread_that_served_may_end(process: Process) -> None:
    process.times[SERVING] = (0, 0)
    process.passes(2, 100)
    process.looked()
    process.passes(20, 100)
    process.looked()
    process.passes(20, 100)
    assert process.looked() == 20


def test_the_more_threads_there_are_the_less_often_they_are_looked_at(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter([0.0, 0.004])  # of two seconds it is 0.002
    monkeypatch.setattr(time, "thread_time", lambda: next(spent))
    process.passes(20, 20)
    assert process.looked() == 20
    for _ in range(7):
        process.passes(3, 3)
        assert process.looked() == 0
    spent = iter([0.0, 0.0])
    process.passes(3, 3)
    assert process.looked() == 24


def test_the_number_of_a_thread_that_ended_may_be_anothers(process: Process) -> None:
    process.times[OTHER] = (0, 0)
    process.passes(20, 3)
    assert process.looked() == 0


def test_where_linux_does_not_tell_it_costs_nothing(tmp_path: Path) -> None:
    for tasks in (tmp_path, tmp_path / "none"):
        cost = ReadCost(frozenset({SERVING}), str(tasks))
        assert [cost.look(100.0 + number) for number in range(5)] == [0.0] * 5


@pytest.fixture
def one_processor() -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this Linux does not tell")
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
        read_cost, began, cost = ReadCost(frozenset(numbers[:1])), time.monotonic(), 0.0
        while cost == 0.0 and time.monotonic() < began + 30.0:
            time.sleep(0.01)
            read_cost.step(now := time.monotonic())
            cost = read_cost.look(now)
        assert 0.0 < cost < time.monotonic() - began
    finally:
        ends.set()
        for thread in threads:
            thread.join()
