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
    answers = {(await kept.get(question, make)).more for _ in range(times)}
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
