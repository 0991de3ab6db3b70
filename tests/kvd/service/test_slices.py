"""Long work in slices: the loop turns between them, askers take turns, and pages go on where the last one ended."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator

import msgspec
import pytest

from kvd.service.errors import RequestRefused
from kvd.service.handlers.pages import PAGE_ROWS, page, place
from kvd.service.loop_monitor import LoopMonitor, event_loop
from kvd.service.slices import SLICE_SECONDS, Slices, spread
from kvd.service.sockets.router import Caller


def slow(count: int) -> Iterator[int | None]:
    """Each takes a tenth of a slice; every other one is nothing."""
    for number in range(count):
        until = time.thread_time() + SLICE_SECONDS / 10
        while time.thread_time() < until:
            pass
        yield number if number % 2 else None


@pytest.mark.usefixtures("no_collection")
def test_the_loop_turns_between_slices_however_many_ask() -> None:
    turns = LoopMonitor()

    async def ask() -> list[list[int]]:
        slices = Slices()
        return await asyncio.gather(*(slices.collect(slow(50)) for _ in range(8)))

    with asyncio.Runner(loop_factory=lambda: event_loop(turns)) as runner:
        found = runner.run(ask())
    assert found == [list(range(1, 50, 2))] * 8
    assert turns.busiest < 4 * SLICE_SECONDS


def test_an_answer_that_cannot_be_made_does_not_keep_others_from_theirs() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError

    async def ask() -> list[int]:
        slices = Slices()
        with pytest.raises(ValueError):  # noqa: PT011 (it has no message)
            await slices.collect(broken())
        return await slices.collect([1, 2])

    assert asyncio.run(ask()) == [1, 2]


def test_what_fails_for_one_is_done_with_the_others() -> None:
    done: list[int] = []

    def act(item: int) -> None:
        if not item % 3:
            raise ValueError(item)
        done.append(item)

    async def work() -> None:
        failed: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failed.append(context["exception"])
        )
        with pytest.raises(ValueError, match="0"):
            spread(range(8), act)
        while len(done) < 5:  # noqa: ASYNC110 (it is the loop's turns that are looked at)
            await asyncio.sleep(0)
        assert [str(error) for error in failed] == ["3", "6"]

    asyncio.run(work())
    assert done == [1, 2, 4, 5, 7]


def test_what_is_spread_is_done_with_each() -> None:
    done: list[int | None] = []

    async def work() -> None:
        spread(slow(60), done.append)
        assert 0 < len(done) < 60
        while len(done) < 60:  # noqa: ASYNC110 (it is the loop's turns that are looked at)
            await asyncio.sleep(0)

    asyncio.run(work())
    assert done == [number if number % 2 else None for number in range(60)]


class Note:
    """Takes what is spread."""

    def take(self, item: object) -> None:
        """One item."""


def test_who_takes_what_is_spread_is_let_go_without_a_search_for_circles() -> None:
    """Full collections are rare in a kvd: what they alone free adds up with the workers that go."""

    async def work() -> bool:
        note = Note()
        known = weakref.ref(note)
        spread(slow(60), note.take)
        del note
        for _ in range(60):  # turns of the loop: more than there are slices
            await asyncio.sleep(0)
        return known() is None

    gc.disable()
    try:
        assert asyncio.run(work())
    finally:
        gc.enable()


class Row(msgspec.Struct, frozen=True):
    number: int


@pytest.mark.parametrize("count", [0, 1, PAGE_ROWS - 1, PAGE_ROWS, PAGE_ROWS + 1, 3 * PAGE_ROWS])
def test_pages_follow_each_other_until_there_are_no_more(count: int) -> None:
    decoder = msgspec.json.Decoder(int)

    async def ask() -> tuple[list[int], int]:
        slices, more, found, pages = Slices(), "", list[int](), 0
        while True:
            after = place(more, decoder)
            rows = ((n, Row(n)) if after is None or n > after else None for n in range(count))
            raw, more = await page(slices, Caller(b"asker"), rows)
            found += [msgspec.msgpack.decode(r, type=Row).number for r in raw]
            pages += 1
            if not more:
                return found, pages

    found, pages = asyncio.run(ask())
    assert found == list(range(count))
    assert pages == max(1, -(-count // PAGE_ROWS))


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(RequestRefused) as error:
        place("no number", msgspec.json.Decoder(int))
    assert error.value.code == "KVD-BAD-QUERY"
