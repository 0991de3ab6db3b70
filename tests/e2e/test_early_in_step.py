"""Loads that the step uses which orders them, in vLLM's asynchronous scheduler: which do, and what is scheduled.

vLLM's own scheduler, stepped by hand; nothing computes, and kvd is one that says yes to everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.test_unloaded_claims import BLOCK, PROMPT, TOKENS, pulled
from tests.support.rigs.in_step import InStepWorker, Open, free_blocks, opening, present, tokens_of
from tests.support.rigs.stepped import WillingKvd

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def worker() -> InStepWorker:
    return present()


@pytest.fixture
def opened(model: Path, kvd: WillingKvd) -> Iterator[Open]:
    with opening(model, kvd, BLOCK) as open_:
        yield open_


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
def test_only_the_step_after_its_first_token_is_put_off(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends the token has Python's lock meanwhile."""
    from kvd.vllm import early  # which imports vLLM

    pauses: list[float] = []
    monkeypatch.setattr(early, "time", SimpleNamespace(sleep=pauses.append))
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    bench.step()
    assert tokens_of(bench, "r") == [7]
    assert pauses == []
    bench.run_out()
    assert pauses == [early.LET_GO_SECONDS]


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


@pytest.mark.parametrize(
    "wish", [{"seed": 3, "temperature": 1.0}, {"prompt_logprobs": 1}], ids=lambda wish: next(iter(wish))
)
def test_a_request_that_cannot_begin_anew_unnoticed_has_none(
    opened: Open, worker: InStepWorker, wish: dict[str, Any]
) -> None:
    bench = opened()
    bench.arrive("r", TOKENS, pulled(), **wish)
    bench.step()
    assert not any(order.in_step for order in worker.begun)


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
