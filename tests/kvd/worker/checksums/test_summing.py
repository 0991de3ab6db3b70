"""The sums that a prefilling worker keeps: how many, for how long, and what it answers of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvd.geometry.rank import Rank
from kvd.topology.checksums.sums import InMemory
from kvd.vllm.memory.page_sums import summer_of
from kvd.vllm.memory.tensors import worker_geometry
from kvd.wire.checksum import GetSums, Sums, SumsOf
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Refused
from kvd.worker.checksums import summing
from kvd.worker.checksums.summing import Summing
from kvd.worker.orders import StepOrders, SumOrder, SumOrders
from tests.support.rigs.bench import cache_config, eventually, full, groups_of, place
from tests.support.rigs.pull import BLOCKS, memory
from tests.support.slow_sums import LONG, Slow


@pytest.fixture
def sums() -> Iterator[Summing]:
    config = cache_config(BLOCKS, (full(), ("l0", "l1")))
    _, tensors = memory(2)
    geometry = worker_geometry(tensors, config, groups_of(config), place())
    keeping = tensors  # the geometry knows addresses only
    made = Summing(geometry, lambda: summer_of(geometry), lambda: None)
    yield made
    made.stop()
    assert made.join(time.monotonic() + LONG)
    del keeping


def ask(made: Summing, name: str, **wanted: int) -> Sums | Refused:
    wanted_blocks = SumsOf(**{"group": 0, "first": 0, "blocks": 2, **wanted})
    return made.answer(
        GetSums(
            engine_id="p", generation="g", endpoint=Endpoint(), rank=Rank(0), request_id=name,
            wanted=(wanted_blocks,),
        )
    )  # fmt: skip


def add_up(made: Summing, *names: str) -> None:
    made.begin(StepOrders(sums=SumOrders([SumOrder(name, name, {0: (0, (2, 3))}, 8) for name in names])))
    made.stepped()
    for name in names:
        eventually(lambda name=name: name not in made._kept or made._kept[name].done)  # type: ignore[misc]


def test_the_oldest_sums_go_when_there_are_too_many(sums: Summing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "MOST_REQUESTS", 2)
    for name in ("a", "b", "c"):
        add_up(sums, name)
    assert isinstance(ask(sums, "a"), Refused)
    assert isinstance(ask(sums, "c"), Sums)


def test_the_oldest_sums_go_when_they_are_too_large(sums: Summing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "MOST_BYTES", 200)
    for name in ("a", "b"):
        add_up(sums, name)
    assert isinstance(ask(sums, "b"), Sums)
    add_up(sums, "c")
    assert isinstance(ask(sums, "a"), Refused)


def test_what_is_asked_for_and_is_not_there_is_refused_for_good(sums: Summing) -> None:
    add_up(sums, "a")
    for wanted in ({"first": 1}, {"group": 1}, {"period": 0}, {"blocks": 0}, {"first": -1}, {"run": 0}):
        answer = ask(sums, "a", **wanted)
        assert isinstance(answer, Refused)
        assert (answer.code, answer.final) == ("KVD-CONNECTOR-SUMS", True)


def test_an_answer_is_bounded_however_much_is_asked_for(
    sums: Summing, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_up(sums, "a")
    one = ask(sums, "a")
    assert isinstance(one, Sums)
    monkeypatch.setattr(summing, "MOST_ANSWERED", 3 * len(one.groups[0]))
    many = GetSums(
        engine_id="p", generation="g", endpoint=Endpoint(), rank=Rank(0), request_id="a",
        wanted=(SumsOf(0, 0, 2),) * 4,
    )  # fmt: skip
    answer = sums.answer(many)
    assert isinstance(answer, Refused)
    assert (
        f"4 sums of request a are asked for at once, and an answer has at most {3 * len(one.groups[0])}"
        in (answer.message)
    )


def test_a_decoder_of_several_context_parallel_ranks_is_served_from_the_next_request_on(
    sums: Summing,
) -> None:
    add_up(sums, "a")
    refused = ask(sums, "a", period=2)
    assert isinstance(refused, Refused)
    assert refused.final
    assert "do not tell the tokens of 2 ranks apart; those of later requests will" in refused.message
    add_up(sums, "b")
    whole, even, odd = (ask(sums, "b", **part) for part in ({}, {"period": 2}, {"period": 2, "which": 1}))
    assert isinstance(whole, Sums)
    assert isinstance(even, Sums)
    assert isinstance(odd, Sums)
    all_, *parts = (np.frombuffer(answer.groups[0], np.uint64) for answer in (whole, even, odd))
    assert (all_ == parts[0] + parts[1]).all()


def test_blocks_of_a_push_are_not_freed_before_they_are_added_up(sums: Summing) -> None:
    geometry_summer = sums._summer()
    assert isinstance(geometry_summer, InMemory)
    slow_one = Slow(geometry_summer)
    sums._summer = lambda: slow_one
    sums.begin(StepOrders(sums=SumOrders([SumOrder("transfer", "r", {0: (0, (2, 3))}, 8)])))
    sums.stepped()
    assert sums.unsummed({"r", "other"}) == {"other"}
    assert sums.unsummed(set()) == set()
    slow_one.go.set()
    eventually(lambda: sums.unsummed(set()) == {"r"})
    assert sums.unsummed(set()) == set()
    assert isinstance(ask(sums, "transfer"), Sums)
