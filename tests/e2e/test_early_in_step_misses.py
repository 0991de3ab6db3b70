"""Loads that the step uses which orders them, in vLLM's asynchronous scheduler: what becomes of a miss.

vLLM's own scheduler, stepped by hand; nothing computes, and kvd is one that says yes to everything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.wire.lease import LeaseClaim
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


def test_nor_what_was_computed_behind_it(opened: Open, worker: InStepWorker) -> None:
    worker.miss = {"r"}
    bench = opened()
    bench.arrive("r", TOKENS, pulled(2 * BLOCK))
    assert bench.step()[0]["r"] == PROMPT - 2 * BLOCK, "the prefiller had the front of the prompt alone"
    manager = bench.scheduler.kv_cache_manager
    (table,) = manager.get_block_ids("r")
    bench.step()
    assert not any(manager.block_pool.blocks[block].block_hash for block in table)
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
    worker.miss = {"r"}
    bench = opened()
    request = bench.arrive("r", TOKENS, pulled())
    bench.step()
    bench.scheduler.running.remove(request)
    bench.scheduler._preempt_request(request, time.monotonic())
    bench.run_out()
    bench.settle()
    assert list(request.output_token_ids) == [7] * 5


def test_one_that_vllm_itself_takes_back_meanwhile_loses_no_token_and_gets_none_twice(
    opened: Open, worker: InStepWorker
) -> None:
    worker.miss = {"r"}
    bench = opened()
    request = bench.arrive("r", TOKENS, pulled())
    bench.step()
    with contextlib.suppress(
        RuntimeError
    ):  # blocks of steps under way are not free yet; by then it is preempted
        bench.scheduler.reset_prefix_cache(reset_running_requests=True)
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
    kvd.silent = False
    other = [token + 1000 for token in TOKENS]
    bench.arrive("s", other, pulled(of=other))
    assert bench.step()[0] == {}
    assert [order.in_step for order in worker.begun] == [True, False], (
        "others would wait for the next one too"
    )


def test_a_load_that_does_not_end_ends_the_engine(
    opened: Open, worker: InStepWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks may still be written, and nobody can be given them."""
    from kvd.vllm.scheduler import in_step

    for name in ("ANSWER_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(in_step, name, 0.0)
    monkeypatch.setattr(worker, "stands", lambda _request_id: False)
    monkeypatch.setattr(worker, "answered", lambda _answers: None)
    bench = opened()
    bench.arrive("r", TOKENS, pulled())
    bench.step()
    with pytest.raises(RuntimeError, match="load of request r was given up and has not ended in 0 s"):
        bench.step()
