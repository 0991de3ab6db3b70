"""Whose KV is added up, when the workers are told, and what the decoder's params then say."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.params import read_remote_prefill
from kvd.worker.errors import BadSettings
from kvd.worker.orders import SumOrder, SumOrders
from kvd.worker.settings import ConnectorSettings, read_settings
from tests.kvd.vllm.scheduler.test_pushes import BlockState, Output
from tests.support.rigs.bench import prefill
from tests.support.rigs.half import LLAMA, PREFILL_HERE, Engine, from_prefiller

NOTHING = SumOrders()


def test_one_in_n_is_the_same_request_every_time() -> None:
    settings = ConnectorSettings(kv_checksum=4)
    names = [f"cmpl-{number}" for number in range(4000)]
    chosen = [name for name in names if settings.samples(name)]
    assert 800 < len(chosen) < 1200
    assert [name for name in names if settings.samples(name)] == chosen
    assert all(ConnectorSettings(kv_checksum="all").samples(name) for name in names)
    assert all(ConnectorSettings(kv_checksum=1).samples(name) for name in names)
    assert not any(ConnectorSettings().samples(name) for name in names)


@pytest.mark.parametrize("given", ["off", "all", 1, 1000])
def test_the_setting_is_a_word_or_a_number(given: str | int) -> None:
    assert read_settings({"kv_checksum": given}).kv_checksum == given


def test_a_wrong_setting_is_told_what_it_may_be() -> None:
    with pytest.raises(
        BadSettings, match='kv_checksum is \'some\'; it must be one of "off", "all" or a whole'
    ):
        read_settings({"kv_checksum": "some"})
    with pytest.raises(
        BadSettings, match=r"kv_checksum is 0; it must be .* a whole number from 1 to .* requests"
    ):
        read_settings({"kv_checksum": 0})


class Scheduler:
    """A prefiller's scheduler that adds everything up, with one request of 10 tokens."""

    def __init__(self, groups: tuple[GroupFacts, ...] = LLAMA, **more: Any) -> None:
        self.engine = Engine("p", groups, **{"kv_checksum": "all", **more})
        self.request = self.engine.arrive(dict(PREFILL_HERE))

    def step(self, tokens: int, *table: list[int], preempted: AbstractSet[str] = frozenset()) -> SumOrders:
        if preempted:
            self.request.num_computed_tokens = 0
        scheduled = {"r": tokens} if tokens else {}
        orders = self.engine.half.step_orders(Output(scheduled, preempted, BlockState({"r": table})))
        self.request.num_computed_tokens += tokens
        return orders.sums

    def finish(self, *table: list[int], completed: bool = True) -> Any:
        return self.engine.half.finished(self.request, table, completed=completed)[1]


def test_a_prompt_is_added_up_with_the_step_that_ends_it_and_the_params_say_so() -> None:
    p = Scheduler()
    assert p.step(4, [5]) == NOTHING
    assert p.step(6, [5, 6, 7]) == SumOrders([SumOrder("r", "r", {0: (0, (5, 6, 7))}, 10)])
    assert p.step(1, [5, 6, 7]) == NOTHING
    params = p.finish([5, 6, 7])
    assert params["kvd_checksum"] == 1
    assert read_remote_prefill(params).checksum


def test_other_blocks_than_those_that_were_added_up_have_no_sums() -> None:
    p = Scheduler()
    p.step(10, [5, 6, 7])
    assert p.finish([5, 6, 8])["kvd_checksum"] == 0
    assert p.step(0) == SumOrders([], ["r"]), "the workers may forget them"


def test_a_preempted_prompt_is_added_up_again() -> None:
    p = Scheduler()
    p.step(10, [5, 6, 7])
    p.step(0, preempted={"r"})
    assert p.step(10, [1, 2, 3]) == SumOrders([SumOrder("r", "r", {0: (0, (1, 2, 3))}, 10)])
    assert p.finish([1, 2, 3])["kvd_checksum"] == 1


def test_an_aborted_request_is_forgotten() -> None:
    p = Scheduler()
    p.step(4, [5])
    assert p.finish([5], completed=False) is None
    assert p.step(0) == SumOrders([], ["r"])


def test_nothing_is_added_up_where_nobody_asked_for_it() -> None:
    p = Scheduler(kv_checksum="off")
    assert p.step(10, [5, 6, 7]) == NOTHING
    assert p.finish([5, 6, 7])["kvd_checksum"] == 0


def test_requests_that_are_not_handed_over_are_not_added_up() -> None:
    engine = Engine("p", LLAMA, kv_checksum="all")
    request = engine.arrive(None)
    orders = engine.half.step_orders(Output({"r": 10}, frozenset(), BlockState({"r": ([5, 6, 7],)})))
    assert orders.sums == NOTHING
    assert engine.half.finished(request, ([5, 6, 7],), completed=True) == (False, None)


def test_a_push_goes_by_its_transfer_id() -> None:
    engine = Engine("p", LLAMA, kv_checksum="all", mode="push")
    request = engine.arrive({**PREFILL_HERE, "transfer_mode": "push", "kvd_transfer_id": "x"})
    orders = engine.half.step_orders(Output({"r": 10}, frozenset(), BlockState({"r": ([5, 6, 7],)})))
    assert orders.sums == SumOrders([SumOrder("x", "r", {0: (0, (5, 6, 7))}, 10)])
    assert [step.sums for step in orders.pushes] == [True]
    request.num_computed_tokens = 10
    assert engine.half.finished(request, ([5, 6, 7],), completed=True) == (True, None)


def test_params_of_a_prefiller_that_says_nothing_of_sums_have_none() -> None:
    params = from_prefiller()
    del params["kvd_checksum"]
    assert not read_remote_prefill(params).checksum
    assert not prefill(((1,),)).checksum
