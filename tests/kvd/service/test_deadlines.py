"""What falls due when: once, never early, at most a tick late, and of many at one moment a slice a turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.service.deadlines import TICK_SECONDS, Deadlines
from kvd.service.loop_monitor import LoopMonitor, event_loop
from kvd.service.slices import SLICE_SECONDS

LONG = 3600.0
Act = Callable[[Deadlines[str], dict[str, float]], Coroutine[Any, Any, None]]


def run(act: Act) -> dict[str, float]:
    """When each name fell due, while ``act`` ran; twice is an error."""
    came: dict[str, float] = {}

    async def work() -> None:
        def due(name: str) -> None:
            assert name not in came
            came[name] = time.monotonic()

        deadlines = Deadlines(due)
        await act(deadlines, came)
        deadlines.close()

    asyncio.run(work())
    return came


async def until(came: dict[str, float], count: int) -> None:
    """Turns of the loop until so many fell due."""
    async with asyncio.timeout(10):
        while len(came) < count:  # noqa: ASYNC110 (it is the loop's turns that are looked at)
            await asyncio.sleep(0)


def test_each_falls_due_once_and_not_before_its_time() -> None:
    times: dict[str, float] = {}

    async def act(deadlines: Deadlines[str], came: dict[str, float]) -> None:
        for name, seconds in (("late", 0.05), ("soon", 0.01), ("past", -1.0)):
            times[name] = time.monotonic() + seconds
            deadlines.set(name, times[name])
        await until(came, 3)
        assert len(deadlines) == 0

    came = run(act)
    assert sorted(came, key=lambda name: came[name]) == ["past", "soon", "late"]
    assert all(came[name] >= times[name] for name in times)


def test_a_later_time_takes_the_place_of_an_earlier_one_and_an_earlier_that_of_a_later() -> None:
    async def act(deadlines: Deadlines[str], came: dict[str, float]) -> None:
        deadlines.set("later", time.monotonic())
        deadlines.set("later", time.monotonic() + LONG)
        deadlines.set("earlier", time.monotonic() + LONG)
        deadlines.set("earlier", time.monotonic())
        deadlines.set("never", time.monotonic())
        deadlines.discard("never")
        deadlines.discard("unknown")
        await until(came, 1)
        await asyncio.sleep(2 * TICK_SECONDS)
        assert len(deadlines) == 1

    assert list(run(act)) == ["earlier"]


def test_what_is_set_again_as_it_falls_due_falls_due_again() -> None:
    count = 0

    async def work() -> None:
        nonlocal count

        def due(name: str) -> None:
            nonlocal count
            count += 1
            if count < 5:
                deadlines.set(name, time.monotonic())

        deadlines = Deadlines(due)
        deadlines.set("again", time.monotonic())
        async with asyncio.timeout(10):
            while count < 5:  # noqa: ASYNC110
                await asyncio.sleep(0)

    asyncio.run(work())
    assert count == 5


def test_an_error_of_one_is_none_of_the_others() -> None:
    done: list[str] = []

    async def work() -> None:
        failed: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failed.append(context["exception"])
        )

        def due(name: str) -> None:
            if name == "bad":
                raise ValueError(name)
            done.append(name)

        deadlines = Deadlines(due)
        for name in ("good", "bad", "fine"):
            deadlines.set(name, time.monotonic())
        async with asyncio.timeout(10):
            while len(done) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert [str(error) for error in failed] == ["bad"]

    asyncio.run(work())
    assert sorted(done) == ["fine", "good"]


@pytest.mark.usefixtures("no_collection")
def test_many_at_one_moment_take_a_slice_of_a_turn() -> None:
    turns = LoopMonitor()
    done: list[int] = []

    def due(number: int) -> None:
        until = time.thread_time() + SLICE_SECONDS / 10
        while time.thread_time() < until:
            pass
        done.append(number)

    async def work() -> None:
        deadlines = Deadlines(due)
        at = time.monotonic() + TICK_SECONDS
        for number in range(200):
            deadlines.set(number, at)
        async with asyncio.timeout(30):
            while len(done) < 200:  # noqa: ASYNC110
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: event_loop(turns)) as runner:
        runner.run(work())
    assert sorted(done) == list(range(200))
    assert turns.busiest < 4 * SLICE_SECONDS


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.one_of(st.none(), st.floats(0.0, LONG, allow_nan=False))),
        max_size=40,
    )
)
def test_it_holds_what_was_set_last_and_not_taken_back(steps: list[tuple[str, float | None]]) -> None:
    async def work() -> None:
        deadlines: Deadlines[str] = Deadlines(lambda _: pytest.fail("nothing is due yet"))
        wanted: dict[str, float] = {}
        for name, seconds in steps:
            if seconds is None:
                deadlines.discard(name)
                wanted.pop(name, None)
            else:
                wanted[name] = time.monotonic() + 60.0 + seconds
                deadlines.set(name, wanted[name])
        assert len(deadlines) == len(wanted)
        deadlines.close()
        assert len(deadlines) == 0

    asyncio.run(work())
