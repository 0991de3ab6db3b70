"""When vLLM's asynchronous scheduler uses a load that is complete: in the next step, where its worker is at hand.

vLLM's own scheduler, stepped by hand; nothing computes, and kvd is one that says yes to everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.wire.lease import LeaseClaim, LeaseClaimed
from kvd.worker.orders import (
    ClaimAnswer,
    LoadOrder,
    PushEnd,
    PushStep,
    StageOrder,
    StepOrders,
    StepOutcomes,
    SumOrders,
)
from kvd.worker.remote import RemotePrefill
from kvd.worker.step_loads import IDLE_WAIT, NEAR, POSTING_WAIT
from tests.e2e.test_unloaded_claims import BLOCK, PROMPT, TOKENS, pulled
from tests.support.rigs.bench import facts, order, prefill
from tests.support.rigs.stepped import OURS, PREFILLER, SteppedScheduler, WillingKvd

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

LAST = PROMPT % BLOCK or BLOCK
"""At most so many tokens are computed after a load: those behind the last whole block."""


class OnlyWorker:
    """What the scheduler asks of an engine's only worker."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.soon: set[str] = set()
        """Complete if it may wait for them."""
        self.begun: list[LoadOrder] = []
        self.waits: list[float] = []
        """Of each time that it was asked for complete loads, how long it might wait for one."""
        self.posting: list[float] = []
        """The same of each step, for its loads to be posted."""
        self.waited = 0
        """How often it was asked for what is due soon."""
        self.in_step = self.loads = self
        self.told: list[ClaimAnswer] = []
        """How claims were answered, as it heard of it ahead of a step."""
        self.within = False
        """Whether its loads can be used in the step that orders them."""
        self.expects = True

    def takes(self, _prefill: RemotePrefill, _tokens: int, _most_seconds: float) -> bool:
        return self.within

    def begin_ahead(self, orders: StepOrders, wait: float) -> bool:
        self.posting.append(wait)
        loads, orders.loads, orders.answered, orders.dropped = orders.loads, [], [], []
        self.begun += loads
        return bool(loads)

    def answered(self, answers: Iterable[ClaimAnswer]) -> None:
        self.told += answers

    @property
    def loading(self) -> list[str]:
        """The requests whose loads have begun."""
        return [order.request_id for order in self.begun]

    def complete(self, wait: float = 0.0) -> tuple[set[str], StepOutcomes]:
        self.waits.append(wait)
        done, self.done = self.done, set()
        return done, StepOutcomes(loads=dict.fromkeys(done), quiesced=dict.fromkeys(done, 1.0))

    def complete_soon(self, *, idle: bool) -> tuple[set[str], StepOutcomes]:
        if not idle:
            return self.complete(NEAR)
        self.waited += 1
        done, self.soon = self.soon, set()
        return done, StepOutcomes(loads=dict.fromkeys(done), quiesced=dict.fromkeys(done, 1.0))


Open = Callable[[], SteppedScheduler]


@pytest.fixture
def worker() -> OnlyWorker:
    """In this process, and all of its engine."""
    from kvd.vllm import early  # which imports vLLM

    here = OnlyWorker()
    early.present(facts("d"), here)  # type: ignore[arg-type]
    return here


@pytest.fixture
def opened(model: Path, kvd: WillingKvd) -> Iterator[Open]:
    made: list[SteppedScheduler] = []

    from kvd.vllm.early import schedule_early

    def open_() -> SteppedScheduler:
        made.append(SteppedScheduler(model, OURS, block=BLOCK, ahead=True, choose=schedule_early))
        kvd.push(PREFILLER)
        return made[-1]

    yield open_
    for bench in made:
        bench.scheduler.shutdown()


def test_a_load_that_is_complete_is_used_in_the_next_step(opened: Open, worker: OnlyWorker) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    assert worker.loading == ["r"]
    worker.done = {"r"}
    computed, _ = bench.step()
    assert 0 < computed["r"] <= LAST
    bench.run_out()


def test_without_its_worker_at_hand_it_is_used_two_steps_later(opened: Open) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step(finished_recving={"r"})
    assert bench.step()[0] == {}, "this step was scheduled before the one before was heard of"
    assert 0 < bench.step()[0]["r"] <= LAST
    bench.run_out()


def test_a_worker_that_expects_nothing_is_not_asked(opened: Open, worker: OnlyWorker) -> None:
    worker.expects = False
    bench = opened()
    bench.arrive("r", TOKENS[:10], None)
    for _ in range(3):
        bench.step()
    assert (worker.waits, worker.posting) == ([], [])
    bench.run_out()


def test_a_load_that_is_not_complete_is_waited_for(opened: Open, worker: OnlyWorker) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    for _ in range(4):
        assert bench.step()[0] == {}
    worker.done = {"r"}
    assert set(bench.step()[0]) == {"r"}
    bench.run_out()


def test_a_miss_is_told_by_the_step_and_computed_here(opened: Open, worker: OnlyWorker) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    (begun,) = worker.begun
    bench.step(finished_recving={"r"}, invalid_block_ids=begun.block_ids)
    assert bench.step()[0] == {}
    assert bench.step()[0] == {"r": PROMPT}
    bench.run_out()
    assert not worker.done


def test_the_lease_is_let_go_when_the_load_is_used(opened: Open, kvd: WillingKvd, worker: OnlyWorker) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    assert kvd.releases == []
    worker.done = {"r"}
    bench.step()
    assert kvd.releases == ["done"]
    bench.run_out()


def test_the_blocks_of_a_request_that_was_aborted_meanwhile_are_free(
    opened: Open, worker: OnlyWorker
) -> None:
    from vllm.v1.request import RequestStatus

    bench = opened()
    pool = bench.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    bench.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert pool.get_num_free_blocks() < free, "its load may still write there"
    worker.done = {"r"}
    bench.step()
    assert pool.get_num_free_blocks() == free


def test_requests_beside_it_go_on(opened: Open, worker: OnlyWorker) -> None:
    bench = opened()
    bench.arrive("beside", TOKENS[:10], None)
    bench.step()
    bench.arrive("r", TOKENS, pulled())
    assert bench.step()[0] == {"beside": 1}
    worker.done = {"r"}
    computed, _ = bench.step()
    assert computed["beside"] == 1
    assert 0 < computed["r"] <= LAST
    bench.run_out()


# --- when it begins ---


def test_a_load_begins_as_its_step_is_scheduled(opened: Open, worker: OnlyWorker) -> None:
    bench = opened()
    bench.arrive("beside", TOKENS[:10], None)
    bench.step()
    bench.arrive("r", TOKENS, pulled())
    assert worker.loading == []
    bench.scheduler.schedule()
    assert worker.loading == ["r"]


def scheduled(orders: StepOrders, **touched: Any) -> Any:
    from kvd.vllm.metadata import StepMetadata

    return SimpleNamespace(kv_connector_metadata=StepMetadata(orders), **touched)


def ordered(**more: Any) -> StepOrders:
    return StepOrders(loads=[order(prefill(((5, 6),)), (2, 9), request_id="r")], **more)


PUSH = PushStep("x", "p-1", {}, reached=0, total=8)


@pytest.mark.parametrize("within", [True, False])
def test_kvd_need_not_tell_a_worker_whose_load_is_short(
    within: bool, opened: Open, kvd: WillingKvd, worker: OnlyWorker
) -> None:
    """Its scheduler hears of the answer as soon as it could use the load."""
    bench = opened()
    bench.step()  # in which it meets its worker
    worker.within = within
    bench.arrive("r", TOKENS, pulled())
    (asked,) = kvd.asked(LeaseClaim)
    assert asked.message.alone is within


def test_an_answer_on_a_claim_is_told_before_the_next_step_is_scheduled(
    opened: Open, kvd: WillingKvd, worker: OnlyWorker
) -> None:
    kvd.silent = True
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    assert (worker.loading, worker.told) == (["r"], [])
    (asked,) = kvd.asked(LeaseClaim)
    name, generation = asked.message.key.request_id, asked.message.generation
    asked.future.set_result(LeaseClaimed(request_id=name, seconds=20.0, generation=generation))
    bench.step()
    (told,) = worker.told
    assert (told.request_id, told.refused) == ("r", None)
    bench.step()
    assert worker.told == [told], "it is told once"


@pytest.mark.parametrize(
    ("orders", "touched", "begun"),
    [
        (ordered(), {}, ["r"]),
        (ordered(), {"new_block_ids_to_zero": None, "kv_cache_block_copies": []}, ["r"]),
        (ordered(), {"new_block_ids_to_zero": [3, 4]}, ["r"]),
        (ordered(), {"new_block_ids_to_zero": [2]}, []),
        (ordered(), {"kv_cache_block_copies": ["2 to 9"]}, []),
        (ordered(pushes=[PUSH]), {}, []),
        (ordered(push_ends=[PushEnd("x", "p-1", 5.0)]), {}, []),
        (ordered(answered=[ClaimAnswer("r", 5.0)], dropped=["d-1"]), {"new_block_ids_to_zero": [2]}, []),
        (StepOrders(), {}, []),
    ],
)
def test_what_a_step_does_to_blocks_beforehand_comes_before_its_loads(
    orders: StepOrders, touched: dict[str, Any], begun: list[str], worker: OnlyWorker
) -> None:
    from kvd.vllm.early import begin_if_untouched

    before = copy.deepcopy(orders)
    assert begin_if_untouched(worker, scheduled(orders, **touched), 0.0) is bool(begun)  # type: ignore[arg-type]
    assert worker.loading == begun
    assert begun or orders == before, "the step does it"


def test_who_computed_nothing_and_has_nothing_new_may_wait(opened: Open, worker: OnlyWorker) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    for _ in range(3):
        bench.step()
    bench.arrive("beside", TOKENS[:10], None)
    for _ in range(2):
        bench.step()
    assert worker.waits == [NEAR, IDLE_WAIT, IDLE_WAIT, NEAR, NEAR], (
        "others put a step off for a moment at most"
    )
    assert worker.posting[:1] == [POSTING_WAIT]
    assert worker.waited == 1, "a step that begins no load is waited in once"
    worker.done = {"r"}
    bench.run_out()


# --- without a step in between ---


def test_an_engine_without_other_work_uses_a_load_in_the_step_that_orders_it(
    opened: Open, worker: OnlyWorker
) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    worker.soon = {"r"}
    computed, _ = bench.step()
    assert worker.loading == ["r"]
    assert 0 < computed["r"] <= LAST
    bench.run_out()


def test_that_step_also_does_what_the_one_that_is_left_out_had_to_do(
    opened: Open, worker: OnlyWorker
) -> None:
    bench = opened()
    bench.arrive("before", TOKENS[:10], None, max_tokens=1)
    bench.step()
    bench.settle()
    bench.arrive("r", TOKENS, pulled())
    worker.soon = {"r"}
    output = bench.scheduler.schedule()
    assert set(output.num_scheduled_tokens) == {"r"}
    assert output.finished_req_ids == {"before"}, "the worker would keep its state for ever"


def test_an_engine_whose_results_are_not_there_makes_a_step(opened: Open, worker: OnlyWorker) -> None:
    """It may not be at an end with what it computed, and what is read of its blocks goes by its steps."""
    from vllm.v1.request import RequestStatus

    bench = opened()
    bench.arrive("before", TOKENS[:10], None, max_tokens=1)
    bench.scheduler.schedule()
    bench.scheduler.finish_requests("before", RequestStatus.FINISHED_ABORTED)
    bench.arrive("r", TOKENS, pulled())
    worker.soon = {"r"}
    assert bench.scheduler.schedule().num_scheduled_tokens == {}


def test_one_that_computes_something_else_waits_for_none_that_is_due_soon(
    opened: Open, worker: OnlyWorker
) -> None:
    bench = opened()
    bench.arrive("beside", TOKENS[:10], None)
    bench.step()
    bench.arrive("r", TOKENS, pulled())
    worker.soon = {"r"}
    assert set(bench.step()[0]) == {"beside"}
    assert worker.waited == 0
    assert set(worker.posting) == {0.0}
    worker.done, worker.soon = {"r"}, set()
    bench.run_out()


def test_what_others_wait_for_is_not_kept_waiting(opened: Open, worker: OnlyWorker) -> None:
    """With data parallelism the engines take their steps together."""
    bench = opened()
    bench.config.parallel_config.data_parallel_size = 2
    bench.arrive("r", TOKENS, pulled())
    worker.soon = {"r"}
    for _ in range(2):
        assert bench.step()[0] == {}
    assert worker.loading == ["r"]
    assert (set(worker.waits), set(worker.posting), worker.waited) == ({0.0}, {0.0}, 0)
    worker.done, worker.soon = {"r"}, set()
    bench.run_out()


@pytest.mark.parametrize(
    ("orders", "more", "left_out"),
    [
        (StepOrders(), {}, True),
        (StepOrders(freed=["p-1"]), {"finished_req_ids": {"d-1"}}, True),
        (StepOrders(dropped=["d-1"]), {}, False),
        (StepOrders(answered=[ClaimAnswer("d-1", 5.0)]), {}, False),
        (StepOrders(), {"total_num_scheduled_tokens": 1}, False),
        (StepOrders(), {"free_encoder_mm_hashes": ["a picture"]}, False),
        (StepOrders(), {"new_block_ids_to_zero": [2]}, False),
        (StepOrders(), {"preempted_req_ids": {"d-2"}}, False),
        (ordered(), {}, False),
        (StepOrders(pushes=[PUSH]), {}, False),
        (StepOrders(push_ends=[PushEnd("x", "p-1", 5.0)]), {}, False),
        (StepOrders(stage=[StageOrder("p-1", {}, 8)]), {}, False),
        (StepOrders(sums=SumOrders(dropped=["p-1"])), {}, False),
    ],
)
def test_a_step_that_has_more_to_do_is_not_left_out(
    orders: StepOrders, more: dict[str, Any], *, left_out: bool
) -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvd.vllm.early import may_be_left_out
    from kvd.vllm.metadata import StepMetadata

    output = SchedulerOutput.make_empty()
    for name, value in {"kv_connector_metadata": StepMetadata(orders), **more}.items():
        setattr(output, name, value)
    assert may_be_left_out(output) is left_out


# --- whose scheduler it becomes ---


def configured(**changes: Any) -> Any:
    given = {
        "async_scheduling": True,
        "scheduler_cls": None,
        "world_size": 1,
        "kv_role": "kv_consumer",
        "kv_connector": "KvdConnector",
    } | changes
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**{n: given[n] for n in ("async_scheduling", "scheduler_cls")}),
        parallel_config=SimpleNamespace(world_size=given["world_size"]),
        kv_transfer_config=SimpleNamespace(kv_role=given["kv_role"], kv_connector=given["kv_connector"]),
    )


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_an_engine_of_one_worker_that_loads_is_scheduled_early(role: str) -> None:
    from kvd.vllm.early import EarlyScheduler, schedule_early

    config = configured(kv_role=role)
    schedule_early(config)
    assert config.scheduler_config.scheduler_cls is EarlyScheduler


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("async_scheduling", False),
        ("scheduler_cls", "somebody.elses"),
        ("world_size", 2),
        ("kv_role", "kv_producer"),
        ("kv_connector", "MultiConnector"),
    ],
)
def test_no_other_engine_is(name: str, value: Any) -> None:
    from kvd.vllm.early import schedule_early

    config = configured(**{name: value})
    schedule_early(config)
    assert config.scheduler_config.scheduler_cls == (value if name == "scheduler_cls" else None)
