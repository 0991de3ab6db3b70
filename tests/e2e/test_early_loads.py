"""When vLLM's asynchronous scheduler uses a load that is complete: in the next step, where its worker is at hand.

vLLM's own scheduler, stepped by hand; nothing computes, and kvd is one that says yes to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.worker.orders import StepOutcomes
from tests.e2e.test_unloaded_claims import BLOCK, PROMPT, TOKENS, loads, pulled
from tests.support.rigs.bench import facts
from tests.support.rigs.stepped import OURS, PREFILLER, SteppedScheduler, WillingKvd

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

LAST = PROMPT % BLOCK or BLOCK
"""At most so many tokens are computed after a load: those behind the last whole block."""


class OnlyWorker:
    """What the scheduler asks of an engine's only worker."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def complete(self) -> tuple[set[str], StepOutcomes]:
        done, self.done = self.done, set()
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
    assert loads(bench.step()[1]) == ["r"]
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
    _, metadata = bench.step()
    (order,) = metadata.orders.loads
    bench.step(finished_recving={"r"}, invalid_block_ids=order.block_ids)
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
