"""What is put off until the step of a load's first token is launched."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.client.errors import RefusedByDaemon, Unencodable
from kvd.wire.reply import Refused
from kvd.wire.transfer import ReportTransfers
from kvd.worker import ends, later
from kvd.worker.later import AT_ONCE, LATER_SECONDS, PUT_OFF_SECONDS, TOGETHER_SECONDS, Later, together
from kvd.worker.orders import StepOrders
from tests.support.no_threads import refuse_threads
from tests.support.rigs.bench import order, prefill, ready
from tests.support.rigs.pull import Rig

SECONDS = 10.0


@pytest.fixture
def works() -> Iterator[Later]:
    made = Later()
    yield made
    made.close(time.monotonic() + SECONDS)


def test_work_is_done_later_on_another_thread(works: Later) -> None:
    done = threading.Event()
    found: list[tuple[float, str]] = []

    def work() -> None:
        found.append((time.monotonic(), threading.current_thread().name))
        done.set()

    began = time.monotonic()
    works.put(work)
    assert done.wait(SECONDS)
    ((at, thread),) = found
    assert (at >= began + LATER_SECONDS, thread) == (True, "kvd-later")


@given(st.floats(0.0, 1e7), st.floats(0.0, 1.0))
def test_what_is_put_off_by_many_is_due_at_the_same_times(now: float, share: float) -> None:
    due = together(now)
    assert LATER_SECONDS - 1e-6 <= due - now <= LATER_SECONDS + TOGETHER_SECONDS + 1e-6
    assert together(now + share * (due - LATER_SECONDS - 1e-6 - now)) == due


class Looks:
    """Puts looks at what was put off close together, and counts them; the engine rests from the third on."""

    def __init__(self, works: Later, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works, self.count = works, 0
        monkeypatch.setattr(later, "together", self.due)

    def due(self, now: float) -> float:
        self.count += 1
        if self.count == 3:
            self.works.stepped = 0.0
        return now


def test_work_waits_while_one_step_follows_the_other(works: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "PUT_OFF_SECONDS", 3600.0)
    monkeypatch.setattr(later, "LATER_SECONDS", 0.0)
    done, looks = threading.Event(), Looks(works, monkeypatch)
    works.stepped = math.inf
    works.put(done.set)
    assert done.wait(SECONDS)
    assert looks.count == 3


def test_work_does_not_wait_for_ever_for_an_engine_that_never_rests(works: Later) -> None:
    done = threading.Event()
    works.stepped = math.inf
    began = time.monotonic()
    works.put(done.set)
    assert done.wait(SECONDS)
    assert time.monotonic() - began >= PUT_OFF_SECONDS - TOGETHER_SECONDS


NOW = 1000.0


@pytest.mark.parametrize(
    ("ages", "stepped", "count"),
    [
        ((0.05, LATER_SECONDS / 2), 0.0, 1),  # the second one's step may be about to be launched
        ((LATER_SECONDS / 2,), 0.0, 0),
        ((0.1, 0.05), NOW - 0.001, 0),
        ((PUT_OFF_SECONDS, 0.05), NOW - 0.001, 2),
        ((PUT_OFF_SECONDS,) * (AT_ONCE + 9), NOW - 0.001, AT_ONCE),
        ((PUT_OFF_SECONDS,) * 4 * AT_ONCE, NOW - 0.001, 2 * AT_ONCE),  # however many come, all are done
        ((PUT_OFF_SECONDS,) * (AT_ONCE + 9), 0.0, AT_ONCE + 9),
    ],
)
def test_how_many_works_are_done_at_a_time(
    works: Later, ages: tuple[float, ...], stepped: float, count: int
) -> None:
    works._works.extend((NOW - age, lambda: None) for age in ages)
    works.stepped = stepped
    assert works._count_due(NOW) == count


def test_an_end_tells_of_what_a_thread_that_is_stuck_has_done() -> None:
    found: list[str] = []
    told: list[list[str]] = []
    reached, go_on = threading.Event(), threading.Event()
    works = Later(lambda: told.append(found.copy()))

    def stuck() -> None:
        reached.set()
        go_on.wait(SECONDS)

    works.put(lambda: found.append("done"))
    works.put(stuck)
    assert reached.wait(SECONDS)
    works.close(time.monotonic())
    assert told == [["done"]]
    go_on.set()


def test_it_is_told_once_when_several_works_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "LATER_SECONDS", 3600.0)
    found: list[str] = []
    works = Later(lambda: found.append("done"))
    works.flush()
    assert found == []
    for name in "ab":
        works.put(lambda name=name: found.append(name))  # type: ignore[misc]
    works.flush()
    assert found == ["a", "b", "done"]
    works.close(time.monotonic() + SECONDS)


def test_where_the_system_starts_no_thread_work_is_done_at_once(
    works: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "kvd-later")
    found: list[str] = []
    works.put(lambda: found.append("at once"))
    assert found == ["at once"]


def test_a_flush_does_it_here_and_once(works: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "LATER_SECONDS", 3600.0)
    found: list[str] = []
    for name in "ab":
        works.put(lambda name=name: found.append(f"{name} {threading.current_thread().name}"))  # type: ignore[misc]
    assert found == []
    here = threading.current_thread().name
    works.flush()
    works.flush()
    assert found == [f"a {here}", f"b {here}"]


def test_the_end_does_all_that_is_left_and_what_comes_after_at_once(
    works: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(later, "LATER_SECONDS", 3600.0)
    found: list[str] = []
    works.put(lambda: found.append("before"))
    works.close(time.monotonic() + SECONDS)
    assert found == ["before"]
    works.put(lambda: found.append("after"))
    assert found == ["before", "after"]
    works.close(time.monotonic() + SECONDS)


def test_work_that_fails_keeps_nothing_from_being_done(
    works: Later, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def fails() -> None:
        raise RuntimeError("on purpose")

    works.put(fails)
    works.put(done.set)
    assert done.wait(SECONDS)
    works.put(fails)
    works.flush()
    assert "put off failed" in caplog.text


# --- what a worker puts off ---


def test_a_load_is_written_down_by_a_step_that_computes_nothing_as_it_was_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(later, "LATER_SECONDS", 3600.0)
    rig = Rig()
    rig.script.push(ready(rig.card))
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    assert rig.results().received == {"d-1"}
    told = time.monotonic()
    rig.decoder.start(StepOrders())
    assert (rig.records(), rig.decoder.tally.take()) == ([], None), "a step that computes has no time for it"
    rig.decoder.start(StepOrders(idle=True))
    (record,) = rig.records()
    began = told - record.moments["reported"]
    assert record.moments["queued"] <= 0 < record.moments["reported"]
    assert began <= told
    counted = rig.decoder.tally.take()
    assert counted is not None
    assert [part.nbytes for part in counted.moved] == [record.bytes]
    rig.close()


def test_a_worker_that_ends_writes_all_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "LATER_SECONDS", 3600.0)
    rig = Rig()
    rig.script.push(ready(rig.card))
    rig.start(order(prefill(((5, 6),)), (2, 9)))
    rig.results()
    assert rig.records() == []
    rig.close()
    assert [record.state for record in rig.records()] == ["done"]


def written_down(monkeypatch: pytest.MonkeyPatch, *, loads: int) -> Rig:
    """A worker that has written down so many loads together."""
    monkeypatch.setattr(later, "LATER_SECONDS", 3600.0)
    rig = Rig()
    rig.script.push(ready(rig.card))
    for number in range(loads):
        rig.start(order(prefill(((5, 6),)), (2, 9), request_id=f"d-{number}"))
        rig.results()
    assert rig.records() == []
    rig.decoder.start(StepOrders(idle=True))
    return rig


def told_of(rig: Rig) -> list[list[str]]:
    """The requests of each message."""
    return [[record.request_id for record in report.records] for report in rig.script.told(ReportTransfers)]


def test_the_records_of_several_loads_go_to_kvd_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "MOST_TOLD", 2)
    rig = written_down(monkeypatch, loads=3)
    assert told_of(rig) == [["d-0", "d-1"], ["d-2"]]
    rig.close()


@pytest.mark.parametrize(
    "why",
    [Unencodable("half a character"), RefusedByDaemon(Refused(code="KVD-WIRE", message="no", final=True))],
    ids=["unencodable", "refused"],
)
def test_where_several_records_are_refused_each_is_told_by_itself(
    monkeypatch: pytest.MonkeyPatch, why: Exception
) -> None:
    rig = written_down(monkeypatch, loads=2)
    (report,) = (one for one in rig.script.delivered if isinstance(one.message, ReportTransfers))
    report.future.set_exception(why)
    assert told_of(rig) == [["d-0", "d-1"], ["d-0"], ["d-1"]]
    rig.close()
