"""Loads that the step uses which orders them, in vLLM's asynchronous scheduler: what is scheduled, what a miss costs.

vLLM's own scheduler, stepped by hand; nothing computes, and kvd is one that says yes to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.wire.lease import LeaseClaim
from kvd.worker.cause import Cause
from kvd.worker.orders import ClaimAnswer, LoadOrder, StepOrders, StepOutcomes
from kvd.worker.remote import RemotePrefill
from tests.e2e.test_unloaded_claims import BLOCK, PROMPT, TOKENS, pulled
from tests.support.rigs.bench import facts
from tests.support.rigs.stepped import OURS, PREFILLER, SteppedScheduler, WillingKvd

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

LOST = Cause("the peer is gone", "TRANSFER_FAILED")


class InStepWorker:
    """An engine's only worker, whose loads can be used in their step; all come, but for those that are to ``miss``."""

    def __init__(self) -> None:
        self.in_step = self
        self.begun: list[LoadOrder] = []
        self.miss: set[str] = set()
        self.longest = 1.0
        """Seconds that any load takes."""
        self.dropped: list[str] = []
        self.gone: list[str] = []
        self.over: set[str] = set()
        """Loads that have ended, and are told of when somebody asks what has."""
        self._told: set[str] = set()

    # --- as early.py has it ---

    def begin_ahead(self, orders: StepOrders, _wait: float) -> bool:
        loads, orders.loads, orders.answered, orders.dropped = orders.loads, [], [], []
        self.begun += loads
        return bool(loads)

    def complete(self, _wait: float = 0.0) -> tuple[set[str], StepOutcomes]:
        return set(), StepOutcomes()

    def complete_soon(self, *, idle: bool) -> tuple[set[str], StepOutcomes]:  # noqa: ARG002 - as the worker has it
        return set(), StepOutcomes()

    # --- as in_step.py has it ---

    def takes(self, _prefill: RemotePrefill, _tokens: int, most_seconds: float) -> bool:
        return self.longest <= most_seconds

    def stands(self, request_id: str) -> bool:
        return request_id not in self.miss | self._told

    def ended(self, _wait: float) -> StepOutcomes:
        ended = {one.request_id for one in self.begun} & ((self.miss | self.over) - self._told)
        self._told |= ended
        causes = {name: LOST if name in self.miss else None for name in ended}
        return StepOutcomes(causes, dict.fromkeys(ended, 1.0))

    def let_go(self, request_id: str) -> None:
        self.gone.append(request_id)

    def answered(self, answers: Iterable[ClaimAnswer]) -> None:
        self.miss |= {answer.request_id for answer in answers if answer.refused}

    def drop(self, request_id: str) -> None:
        self.dropped.append(request_id)

    def orders(self, request_id: str) -> list[LoadOrder]:
        return [order for order in self.begun if order.request_id == request_id]


Open = Callable[..., SteppedScheduler]


@pytest.fixture
def worker() -> InStepWorker:
    """In this process, and all of its engine; its loads are short."""
    from kvd.vllm import early  # which imports vLLM

    here = InStepWorker()
    here.longest = 1e-3
    early.present(facts("d"), here)  # type: ignore[arg-type]
    return here


@pytest.fixture
def opened(model: Path, kvd: WillingKvd) -> Iterator[Open]:
    made: list[SteppedScheduler] = []

    from kvd.vllm.early import schedule_early

    def open_(more: dict[str, Any] | None = None, policy: str = "recompute") -> SteppedScheduler:
        connector = {**OURS, "kv_load_failure_policy": policy, "kv_connector_extra_config": more or {}}
        made.append(SteppedScheduler(model, connector, block=BLOCK, ahead=True, choose=schedule_early))
        kvd.push(PREFILLER)
        return made[-1]

    yield open_
    for bench in made:
        bench.scheduler.shutdown()


def free_blocks(bench: SteppedScheduler) -> int:
    return int(bench.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def tokens_of(bench: SteppedScheduler, request_id: str) -> list[int]:
    """What the last step's results gave to a request."""
    return [token for one in bench.outputs if one.request_id == request_id for token in one.new_token_ids]


# --- what is scheduled ---


def test_the_step_that_orders_a_load_computes_its_request(opened: Open, worker: InStepWorker) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    computed, _ = bench.step()
    assert computed == {"r": 1}, "the prompt's last token"
    (order,) = worker.begun
    assert (order.in_step, order.tokens) == (True, PROMPT - 1)
    bench.run_out()


@pytest.mark.usefixtures("worker")
def test_others_compute_in_that_step_too(opened: Open) -> None:
    bench = opened()
    bench.arrive("beside", TOKENS[:10], None)
    bench.step()
    bench.arrive("r", TOKENS, pulled())
    assert bench.step()[0] == {"beside": 1, "r": 1}
    bench.run_out()


@pytest.mark.parametrize(("longest", "within"), [(1e-3, True), (3e-3, False)])
def test_others_are_not_kept_waiting_for_a_long_load(
    opened: Open, worker: InStepWorker, longest: float, *, within: bool
) -> None:
    worker.longest = longest
    bench = opened()
    bench.arrive("beside", TOKENS[:10], None)
    bench.step()
    bench.arrive("r", TOKENS, pulled())
    assert ("r" in bench.step()[0]) is within
    assert [order.in_step for order in worker.begun] == [within]


def test_an_engine_without_others_waits_for_a_longer_one(opened: Open, worker: InStepWorker) -> None:
    worker.longest = 3e-3
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    assert bench.step()[0] == {"r": 1}


@pytest.mark.parametrize(
    ("settings", "policy"), [({"in_step": "off"}, "recompute"), ({}, "fail"), ({"in_step": "off"}, "fail")]
)
def test_where_it_is_off_or_a_miss_fails_the_request_loads_come_between_steps(
    opened: Open, worker: InStepWorker, settings: dict[str, Any], policy: str
) -> None:
    bench = opened(settings, policy)
    bench.arrive("r", TOKENS, pulled())
    assert bench.step()[0] == {}
    (order,) = worker.begun
    assert (order.in_step, order.tokens) == (False, PROMPT)


def test_a_scheduler_that_cannot_take_requests_back_has_none(
    opened: Open, worker: InStepWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.vllm import taking_back

    monkeypatch.setattr(taking_back, "_TAKES_DROPS", False)
    monkeypatch.setattr(taking_back, "_TAKES_COUNTS", False)
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    assert bench.step()[0] == {}
    assert [order.in_step for order in worker.begun] == [False]


@pytest.mark.parametrize(
    "change",
    [
        {"speculative_config": object()},
        {"parallel_config": SimpleNamespace(data_parallel_size=2)},
        {"cache_config": SimpleNamespace(mamba_cache_mode="align")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_drafters_lockstep_and_copied_states_are_left_alone(opened: Open, change: dict[str, Any]) -> None:
    from kvd.vllm.taking_back import can_take_back

    scheduler = opened().scheduler
    assert can_take_back(scheduler)
    config = SimpleNamespace(
        speculative_config=None,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
    )
    kept = {name: getattr(scheduler, name) for name in ("kv_cache_manager", "prev_step_scheduled_req_ids")}
    assert can_take_back(SimpleNamespace(vllm_config=config, **kept))
    assert not can_take_back(
        SimpleNamespace(vllm_config=SimpleNamespace(**{**vars(config), **change}), **kept)
    )


# --- a load that stands ---


def test_its_lease_is_let_go_once_the_answer_is_out(
    opened: Open, kvd: WillingKvd, worker: InStepWorker
) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    bench.step()
    assert tokens_of(bench, "r") == [7]
    bench.step()
    assert kvd.releases == [], "the answer goes out meanwhile"
    bench.step()
    assert (kvd.releases, worker.gone) == (["done"], ["r"])
    bench.run_out()
    assert kvd.releases == ["done"]


@pytest.mark.usefixtures("worker")
def test_it_is_let_go_at_once_where_the_first_token_is_the_last(opened: Open, kvd: WillingKvd) -> None:
    bench = opened()
    free = free_blocks(bench)
    bench.arrive("r", TOKENS, pulled(), max_tokens=1)
    bench.run_out()
    bench.settle()
    assert (kvd.releases, free_blocks(bench)) == (["done"], free)


def test_what_is_heard_of_one_while_another_is_told_is_kept(
    opened: Open, kvd: WillingKvd, worker: InStepWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.vllm.scheduler import in_step

    def never(*_: Any) -> None:
        raise AssertionError("given up")

    monkeypatch.setattr(in_step.InStep, "_give_up", never)
    bench = opened()
    other = [token + 1000 for token in TOKENS]
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    bench.step()
    bench.arrive("s", other, pulled(of=other))
    assert bench.step()[0]["s"] == 1
    worker.over = {"s"}
    bench.step()
    assert "r" in worker.gone, "it was told of, and what has ended was asked for"
    bench.run_out()
    bench.settle()
    assert kvd.releases == ["done", "done"]


# --- one that does not ---


def test_of_a_miss_nobody_sees_a_token_and_the_request_is_computed(
    opened: Open, kvd: WillingKvd, worker: InStepWorker
) -> None:
    worker.miss = {"r"}
    bench = opened()
    free = free_blocks(bench)
    request = bench.arrive("r", TOKENS, pulled())
    assert bench.step()[0] == {"r": 1}
    bench.step()
    assert tokens_of(bench, "r") == [], "the step with the load, and one more was scheduled by then"
    assert bench.step()[0] == {"r": PROMPT}
    assert tokens_of(bench, "r") == []
    bench.run_out()
    bench.settle()
    assert list(request.output_token_ids) == [7] * 5
    assert (kvd.releases, len(kvd.asked(LeaseClaim))) == (["miss"], 1)
    assert len(worker.orders("r")) == 1, "it is not claimed again"
    assert free_blocks(bench) == free


def test_what_was_not_loaded_does_not_count_as_cached(opened: Open, worker: InStepWorker) -> None:
    worker.miss = {"r"}
    bench = opened()
    request = bench.arrive("r", TOKENS, pulled())
    for _ in range(3):
        bench.step()
    assert request.prefill_stats.num_cached_tokens == 0


def test_requests_beside_a_miss_go_on(opened: Open, worker: InStepWorker) -> None:
    worker.miss = {"r"}
    bench = opened()
    beside = bench.arrive("beside", TOKENS[:10], None, max_tokens=9)
    bench.step()
    bench.arrive("r", TOKENS, pulled())
    bench.run_out()
    bench.settle()
    assert list(beside.output_token_ids) == [7] * 9


def test_nobody_finds_in_the_cache_what_did_not_come(opened: Open, worker: InStepWorker) -> None:
    worker.miss = {"r"}
    bench = opened()
    bench.arrive("r", TOKENS, pulled(), max_tokens=1)
    bench.step()
    (order,) = worker.begun
    pool = bench.scheduler.kv_cache_manager.block_pool
    assert any(pool.blocks[block].block_hash for block in order.block_ids), (
        "vLLM hashes them as they are given"
    )
    bench.step()
    assert not any(pool.blocks[block].block_hash for block in order.block_ids)
    bench.run_out()


def test_who_has_the_same_prompt_waits_for_the_verdict(opened: Open, worker: InStepWorker) -> None:
    worker.miss = {"r"}
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.arrive("same", TOKENS, None)
    assert bench.step()[0] == {"r": 1}
    assert "same" not in bench.step()[0]
    computed: dict[str, int] = {}
    while "same" not in computed:
        computed = bench.step()[0]
    bench.run_out()
    assert computed["same"] + computed.get("r", 0) >= PROMPT, "one of them computes all of it"


@pytest.mark.usefixtures("worker")
def test_who_has_another_prompt_does_not(opened: Open) -> None:
    bench = opened()
    other = [token + 1000 for token in TOKENS]
    bench.arrive("cached", other, None, max_tokens=1)
    bench.run_out()
    bench.settle()
    bench.arrive("r", TOKENS, pulled())
    bench.arrive("other", other, None)
    assert set(bench.step()[0]) == {"r", "other"}
    bench.run_out()


def test_a_request_that_vllm_preempts_meanwhile_is_taken_back_too(opened: Open, worker: InStepWorker) -> None:
    import time

    worker.miss = {"r"}
    bench = opened()
    request = bench.arrive("r", TOKENS, pulled())
    bench.step()
    bench.scheduler.running.remove(request)
    bench.scheduler._preempt_request(request, time.monotonic())
    bench.run_out()
    bench.settle()
    assert list(request.output_token_ids) == [7] * 5


def test_of_a_request_that_was_aborted_meanwhile_nothing_is_left(
    opened: Open, kvd: WillingKvd, worker: InStepWorker
) -> None:
    from vllm.v1.request import RequestStatus

    bench = opened()
    free = free_blocks(bench)
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    bench.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert (worker.dropped, len(kvd.releases)) == (["r"], 1)
    bench.settle()
    bench.step()
    assert free_blocks(bench) == free


def test_nobody_finds_what_did_not_come_for_a_request_that_was_aborted(
    opened: Open, worker: InStepWorker
) -> None:
    from vllm.v1.request import RequestStatus

    worker.miss = {"r"}
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.arrive("same", TOKENS, None)
    bench.step()
    bench.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert bench.step()[0] == {}, "nobody is given its blocks before they are out of the cache"
    assert bench.step()[0] == {"same": PROMPT}
    bench.run_out()


def test_a_claim_that_is_never_answered_is_a_miss(
    opened: Open, kvd: WillingKvd, worker: InStepWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.vllm.scheduler import in_step

    monkeypatch.setattr(in_step, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(worker, "stands", lambda _request_id: False)
    kvd.silent = True
    bench = opened()
    request = bench.arrive("r", TOKENS, pulled())
    bench.run_out()
    bench.settle()
    assert list(request.output_token_ids) == [7] * 5
    assert worker.miss == {"r"}
