"""The list of engines that all kvds of a fleet ask for each second is made once for those who ask within a moment."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvd.service.engines import listed
from kvd.service.engines.listed import Listed
from kvd.wire.query import EngineList, ListEngines


class Maker:
    """Makes lists, each with another mark."""

    def __init__(self) -> None:
        self.made = 0

    async def __call__(self) -> EngineList:
        self.made += 1
        await asyncio.sleep(0)
        return EngineList(rows=(), more=str(self.made))


async def asked(times: int, question: ListEngines) -> tuple[int, set[str]]:
    kept, make = Listed(), Maker()
    answers = {(await kept.get(question, 1, make)).more for _ in range(times)}
    return make.made, answers


def test_many_who_ask_within_a_moment_are_given_one_list() -> None:
    assert asyncio.run(asked(1000, ListEngines())) == (1, {"1"})


def test_a_list_is_not_kept_for_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "KEPT_SECONDS", 0.0)
    made, answers = asyncio.run(asked(5, ListEngines()))
    assert made == len(answers) == 5


@pytest.mark.parametrize("change", [{"after": "e1"}, {"cards": True}])
def test_other_questions_are_answered_anew_each_time(change: dict[str, object]) -> None:
    question = msgspec.structs.replace(ListEngines(), **change)
    assert asyncio.run(asked(3, question)) == (3, {"1", "2", "3"})


def test_who_was_told_of_a_change_gets_a_list_that_was_made_after_it() -> None:
    async def talk() -> list[str]:
        kept, make = Listed(), Maker()
        return [(await kept.get(ListEngines(), changes, make)).more for changes in (1, 1, 2, 2)]

    assert asyncio.run(talk()) == ["1", "1", "2", "2"]


def test_a_list_that_took_longer_to_make_does_not_take_the_place_of_a_newer_one() -> None:
    async def talk() -> str:
        kept, slow, make = Listed(), asyncio.Event(), Maker()

        async def slowly() -> EngineList:
            await slow.wait()
            return EngineList(rows=(), more="old")

        old = asyncio.create_task(kept.get(ListEngines(), 1, slowly))
        await asyncio.sleep(0)
        await kept.get(ListEngines(), 2, make)
        slow.set()
        assert (await old).more == "old"
        return (await kept.get(ListEngines(), 2, make)).more

    assert asyncio.run(talk()) == "1"
