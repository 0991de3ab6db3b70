"""The scheduler for builds that hear of bad blocks only: which request a block names, and what becomes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.builds.probe import SCHEDULER
from tests.support.rigs.bench import SlidingWindowSpec, cache_config, full, gdn

recovering = pytest.importorskip("kvd.vllm.builds.recovering", reason="needs vLLM", exc_type=ImportError)

HYBRID = cache_config(8, (gdn(), ("m",)), (full(), ("a",)))
WINDOWED = cache_config(8, (SlidingWindowSpec(block_size=4, sliding_window=8), ("w",)))
DENSE = cache_config(8, (full(), ("a",)))
TABLES: dict[str, tuple[list[int], ...]] = {"a": ([3], [4, 5]), "b": ([6], [7]), "c": ([8], [4])}


def scheduler(policy: str = "recompute", config: SimpleNamespace = HYBRID, **states: str) -> Any:
    """Requests a and b wait for their loads, c runs; a and c share block 4, as prefixes may."""
    from vllm.v1.request import RequestStatus

    names = {"a": "WAITING_FOR_REMOTE_KVS", "b": "WAITING_FOR_REMOTE_KVS", "c": "RUNNING", **states}
    made = object.__new__(recovering._Recovering)
    made.kv_cache_config = config
    made.requests = {
        name: SimpleNamespace(request_id=name, status=RequestStatus[state], num_computed_tokens=10)
        for name, state in names.items()
    }
    made.kv_cache_manager = SimpleNamespace(get_block_ids=TABLES.__getitem__)
    made.recompute_kv_load_failures = policy == "recompute"
    made.failed_recving_kv_req_ids = set()
    return made


def computed(made: Any) -> dict[str, int]:
    return {name: request.num_computed_tokens for name, request in made.requests.items()}


@pytest.mark.parametrize("block", [3, 5])
def test_any_block_of_any_group_names_the_request_that_waits(block: int) -> None:
    made = scheduler()
    assert made._handle_invalid_blocks({block}, {}) == set()
    assert made.failed_recving_kv_req_ids == {"a"}
    assert computed(made) == {"a": 0, "b": 10, "c": 10}


def test_who_does_not_wait_is_not_concerned() -> None:
    made = scheduler(a="RUNNING")
    assert made._handle_invalid_blocks({3, 4, 5, 8}, {"a": 1}) == set()
    assert made.failed_recving_kv_req_ids == set()
    assert computed(made) == {"a": 10, "b": 10, "c": 10}


def test_another_rank_may_report_the_same_load_later() -> None:
    made = scheduler()
    made._handle_invalid_blocks({3}, {})
    made._handle_invalid_blocks({4, 5}, {})
    assert made.failed_recving_kv_req_ids == {"a"}


def test_with_policy_fail_the_request_is_given_back_to_be_ended() -> None:
    made = scheduler("fail")
    assert made._handle_invalid_blocks({5, 7}, {}) == {"a", "b"}
    assert made.failed_recving_kv_req_ids == set()


def test_a_window_alone_is_handled_like_several_groups() -> None:
    made = scheduler(config=WINDOWED)
    made._handle_invalid_blocks({3}, {})
    assert made.failed_recving_kv_req_ids == {"a"}


def test_what_keeps_its_prefix_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def own(_self: object, blocks: set[int], _scheduled: object) -> set[str]:
        asked.append(blocks)
        return {"vllm's"}

    monkeypatch.setattr(recovering.Scheduler, "_handle_invalid_blocks", own)
    assert scheduler(config=DENSE)._handle_invalid_blocks({3}, {}) == {"vllm's"}
    assert asked == [{3}]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_path_that_is_configured_makes_the_kind_that_is_configured(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setattr(recovering.Scheduler, "__init__", lambda self, **given: self.__dict__.update(given))
    monkeypatch.setattr(
        recovering.EarlyScheduler, "__init__", lambda self, **given: self.__dict__.update(given)
    )
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=asynchronous))
    made = resolve_obj_by_qualname(SCHEDULER)(vllm_config=config, block_size=4)
    assert isinstance(made, recovering.EarlyScheduler) == asynchronous
    assert isinstance(made, recovering.Scheduler)
    assert made.block_size == 4
