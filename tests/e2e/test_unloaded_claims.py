"""Claims that vLLM loads nothing of: its own scheduler, stepped by hand, with our connector alone and beside another.

No engine and no model that runs; kvd is one that says yes to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.vllm.params import finished_prefill
from kvd.wire.lease import LeaseClaim, LeaseClaimed
from tests.support.rigs.bench import KEY, prefill, prompt
from tests.support.rigs.stepped import OURS, PREFILLER, SteppedScheduler, WillingKvd

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

PROMPT = 100
TOKENS = list(range(10, 10 + PROMPT))
BLOCK = 16
ANOTHER = {
    "kv_connector": "ClaimingConnector",
    "kv_connector_module_path": "tests.support.claiming_connector",
    "kv_role": "kv_both",
}


def pulled(tokens: int = PROMPT, of: list[int] = TOKENS) -> dict[str, Any]:
    blocks = tuple(range(1, 1 + -(-tokens // BLOCK)))
    digest = prompt(of[:tokens]).digest(KEY, tokens)
    return finished_prefill(prefill((blocks,), tokens=tokens, digest=digest), tp=1, pp=1, dcp=1)


def pushed() -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": "push",
        "kvd_transfer_id": "x",
        "remote_engine_id": "p",
        "remote_host": "h",
        "remote_port": 7,
        "kvd_contract": pulled()["kvd_contract"],
    }


Open = Callable[..., SteppedScheduler]


@pytest.fixture
def opened(model: Path, kvd: WillingKvd) -> Iterator[Open]:
    """Schedulers with our connector, or with a MultiConnector of several."""
    made: list[SteppedScheduler] = []

    def open_(*connectors: dict[str, Any]) -> SteppedScheduler:
        several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        several["kv_connector_extra_config"] = {"connectors": list(connectors)}  # type: ignore[assignment]
        made.append(SteppedScheduler(model, several if len(connectors) > 1 else connectors[0], block=BLOCK))
        kvd.push(PREFILLER)  # as kvd does ahead of requests
        return made[-1]

    assert kvd.releases == []
    yield open_
    for bench in made:
        bench.scheduler.shutdown()


def loads(metadata: Any) -> list[str]:
    """The requests that a step has our workers load."""
    ours = getattr(metadata, "metadata", (metadata,))
    return [order.request_id for one in ours if hasattr(one, "orders") for order in one.orders.loads]


@pytest.mark.parametrize("wish", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=str)
@pytest.mark.parametrize("silent", [False, True], ids=["answered", "unanswered"])
def test_a_request_that_wants_every_position_computed_lets_the_prefill_go(
    opened: Open, kvd: WillingKvd, wish: dict[str, Any], silent: bool
) -> None:
    kvd.silent = silent
    bench = opened(OURS)
    bench.arrive("r", TOKENS, pulled(), **wish)
    computed, metadata = bench.step()
    assert (computed, loads(metadata)) == ({"r": PROMPT}, [])
    assert kvd.releases == ["done"]
    bench.run_out()
    assert (kvd.releases, len(kvd.asked(LeaseClaim))) == (["done"], 1)


def test_a_push_of_such_a_request_is_declined(opened: Open) -> None:
    bench = opened({**OURS, "kv_connector_extra_config": {"mode": "push"}})
    bench.arrive("r", TOKENS, pushed(), prompt_logprobs=1)
    computed, metadata = bench.step()
    assert computed == {"r": PROMPT}
    assert [name for name, _ in metadata.orders.declined] == ["x"]


def test_a_prompt_that_is_cached_here_lets_the_prefill_go(opened: Open, kvd: WillingKvd) -> None:
    bench = opened(OURS)
    bench.arrive("before", TOKENS, None)
    bench.run_out()
    bench.arrive("r", TOKENS, pulled(PROMPT // BLOCK * BLOCK))
    computed, metadata = bench.step()
    assert (computed, loads(metadata)) == ({"r": PROMPT % BLOCK}, [])
    assert kvd.releases == ["done"]


def test_a_prompt_of_which_a_part_is_cached_here_loads_the_rest(opened: Open, kvd: WillingKvd) -> None:
    bench = opened(OURS)
    bench.arrive("before", TOKENS, None)
    bench.run_out()
    bench.arrive("r", TOKENS, pulled())
    assert loads(bench.step()[1]) == ["r"]
    assert kvd.releases == []


def test_what_another_connector_loads_is_let_go(opened: Open, kvd: WillingKvd) -> None:
    bench = opened(ANOTHER, OURS)
    bench.arrive("r", TOKENS, pulled())
    computed, metadata = bench.step()
    assert (computed, loads(metadata)) == ({}, [])
    assert bench.scheduler.requests["r"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert kvd.releases == ["done"]


def test_what_another_connector_loads_is_declined_where_it_is_pushed(opened: Open) -> None:
    bench = opened(ANOTHER, {**OURS, "kv_connector_extra_config": {"mode": "push"}})
    bench.arrive("r", TOKENS, pushed())
    _, metadata = bench.step()
    assert [name for name, _ in metadata.metadata[1].orders.declined] == ["x"]


def test_the_first_step_has_a_load_begin_though_kvd_has_not_answered(opened: Open, kvd: WillingKvd) -> None:
    kvd.silent = True
    bench = opened(OURS)
    bench.arrive("r", TOKENS, pulled())
    computed, metadata = bench.step()
    assert (computed, loads(metadata)) == ({}, ["r"])
    assert bench.scheduler.requests["r"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert bench.step()[1].orders.answered == []
    for asked in kvd.asked(LeaseClaim):
        asked.answer(LeaseClaimed(request_id="p-1", seconds=20.0, generation=asked.message.generation))
    assert [(one.request_id, one.refused) for one in bench.step()[1].orders.answered] == [("r", None)]


def test_of_two_connectors_ours_loads_where_it_comes_first(opened: Open, kvd: WillingKvd) -> None:
    bench = opened(OURS, ANOTHER)
    bench.arrive("r", TOKENS, pulled())
    assert loads(bench.step()[1]) == ["r"]
    assert kvd.releases == []


def test_a_request_that_is_aborted_before_its_turn_lets_the_prefill_go(opened: Open, kvd: WillingKvd) -> None:
    from vllm.v1.request import RequestStatus

    kvd.silent = True
    bench = opened(OURS)
    bench.arrive("r", TOKENS, pulled())
    assert kvd.releases == []
    bench.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert kvd.releases == ["aborted"]


def test_a_request_that_is_preempted_claims_nothing_anew(opened: Open, kvd: WillingKvd) -> None:
    bench = opened(OURS)
    bench.arrive("r", TOKENS, pulled(), prompt_logprobs=1)
    bench.step()
    request = bench.scheduler.requests["r"]
    bench.scheduler.running.remove(request)
    bench.scheduler._preempt_request(request, 0.0)
    bench.run_out()
    assert (kvd.releases, len(kvd.asked(LeaseClaim))) == (["done"], 1)


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
def test_why_no_load_of_ours_runs_inside_a_step(
    model: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """A load that ends in the step that computes, and fails, on vLLM's own scheduler: docs/connector.md has it."""
    bench = SteppedScheduler(model, ANOTHER, block=BLOCK, ahead=ahead)
    claimed = iter([(PROMPT - 1, False)])
    connector = bench.scheduler.connector
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", lambda *_request: next(claimed, (0, False)))
    bench.arrive("r", TOKENS, None)
    bad: set[int] = set()  # filled before vLLM looks at the step's end
    allocated = connector.update_state_after_alloc

    def fails(request: Any, blocks: Any, external: int) -> None:
        allocated(request, blocks, external)
        bad.update(blocks.get_block_ids()[0])

    monkeypatch.setattr(connector, "update_state_after_alloc", fails)
    computed = [bench.step(invalid_block_ids=bad)[0]]
    monkeypatch.undo()
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", lambda *_request: (0, False))
    given_out: list[list[int]] = []
    while len(computed) < 3:
        computed.append(bench.step()[0])
        given_out.append([token for one in bench.outputs for token in one.new_token_ids])
    bench.scheduler.shutdown()
    assert computed[0] == {"r": 1}
    if ahead:
        assert computed[1:] == [{"r": 1}, {"r": PROMPT + 2}], "two tokens that nobody has computed"
        assert given_out == [[], [7]], "the second step's, computed on what never came"
    else:
        assert computed[1:] == [{"r": PROMPT}, {"r": 1}]
        assert given_out == [[7], [7]]
