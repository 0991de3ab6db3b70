"""What the halves tell each other crosses processes and is merged over workers."""

from __future__ import annotations

import pickle

from kvd.worker.orders import StepOrders, StepOutcomes, block_lists
from tests.support.rigs.bench import order, prefill, why


def test_orders_cross_processes() -> None:
    orders = StepOrders(loads=[order(prefill(((5, 6),)), (2, 9))], freed=["a"])
    assert pickle.loads(pickle.dumps(orders)) == orders  # noqa: S301 - we just made it


def test_an_order_knows_its_blocks_by_group_and_all_together() -> None:
    one = order(prefill(((5, 6), (7,))), (2, 9), (3,))
    assert {g: b.ids.tolist() for g, b in block_lists(one.groups).items()} == {0: [2, 9], 1: [3]}
    assert one.block_ids == {2, 3, 9}


def test_a_miss_on_any_worker_is_a_miss() -> None:
    first, second = (
        StepOutcomes({"a": None, "b": why("lost")}),
        StepOutcomes({"a": why("gone"), "b": why("late"), "c": None}),
    )
    assert first.merge(second).loads == {"a": why("gone"), "b": why("lost"), "c": None}
    assert second.merge(first).loads == {"a": why("gone"), "b": why("late"), "c": None}


def test_reads_cost_an_engine_what_they_cost_its_slowest_worker() -> None:
    assert StepOutcomes(read_cost=0.01).merge(StepOutcomes(read_cost=0.03)).read_cost == 0.03
