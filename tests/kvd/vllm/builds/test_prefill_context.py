"""Prefill context parallelism: whose KV peers know, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvd.geometry.rank import Rank
from kvd.vllm.builds.versions import check_prefill_context, is_copy, place
from kvd.vllm.errors import UnsupportedBuild
from tests.support.raising import raises


def config(*, pcp: int = 1, dcp: int = 1, tp: int = 1, role: str = "kv_producer", mla: bool = True) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=pcp, decode_context_parallel_size=dcp, tensor_parallel_size=tp
        ),
        kv_transfer_config=SimpleNamespace(kv_role=role),
        model_config=SimpleNamespace(
            use_mla=mla, hf_text_config=SimpleNamespace(), get_total_num_kv_heads=lambda: 1
        ),
        device_config=SimpleNamespace(device_type="cuda"),
    )


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand on a rank of vLLM's process groups."""

    def at_(*, tp: int = 0, pcp: int = 0, pp: int = 0) -> None:
        state = ModuleType("vllm.distributed.parallel_state")
        for name, value in {
            "get_pcp_group": lambda: SimpleNamespace(rank_in_group=pcp),
            "get_pp_group": lambda: SimpleNamespace(rank_in_group=pp),
            "get_tensor_model_parallel_rank": lambda: tp,
        }.items():
            setattr(state, name, value)
        monkeypatch.setitem(sys.modules, state.__name__, state)

    return at_


def test_without_it_nothing_is_asked_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", None)
    assert not is_copy(config())
    assert not is_copy(SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=2)))


@pytest.mark.parametrize("rank", [0, 1])
def test_of_ranks_that_all_have_all_kv_peers_know_the_first(at: Any, rank: int) -> None:
    at(pcp=rank, tp=1)
    wide = config(pcp=2, tp=2, mla=False)
    check_prefill_context(wide)
    assert is_copy(wide) is (rank > 0)
    assert (place(wide).rank, place(wide).tp) == (Rank(tp=1, pp=0, dcp=0), 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_have_a_part_each_are_told_apart(at: Any, rank: int) -> None:
    at(pcp=rank)
    shared = config(pcp=2, dcp=2)
    check_prefill_context(shared)
    assert not is_copy(shared)
    here = place(shared)
    assert (here.rank, here.tp, here.dcp) == (Rank(tp=rank, pp=0, dcp=rank), 2, 2)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_an_engine_that_decodes_does_not_start_with_it(role: str) -> None:
    check_prefill_context(config(role=role))
    with raises(
        "KVD-CONNECTOR-BUILD", match=f"--prefill-context-parallel-size 2 with kv_role {role}: .* leave it"
    ):
        check_prefill_context(config(pcp=2, role=role))


@pytest.mark.parametrize(
    "more", [{"tp": 2}, {"pcp": 4}, {"mla": False}], ids=["several ranks", "another size", "no MLA"]
)
def test_shards_over_both_kinds_of_ranks_are_refused_with_all_sizes(more: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedBuild, match=r"--prefill-context-parallel-size . with --decode-context-parallel-size 2"
    ):
        check_prefill_context(config(**{"pcp": 2, "dcp": 2, **more}))
