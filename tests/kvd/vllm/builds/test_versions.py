"""What is asked of vLLM for the order of KV memory's dimensions, and whether it may sleep."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvd.service.engines.contradictions import contradiction
from kvd.vllm.builds import versions
from kvd.vllm.builds.probe import Safety
from kvd.vllm.builds.versions import (
    check_sleep,
    engine_facts,
    joins_layers,
    lookahead,
    one_engine,
    place,
    required_layout,
    several_hosts,
)
from kvd.vllm.errors import UnsupportedBuild
from kvd.vllm.vllm_types import LOOKAHEAD, lookahead_of
from kvd.wire.identity import EngineFacts
from kvd.worker.settings import read_settings


def configured(*, mla: bool = False) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(use_mla=mla))


@pytest.mark.parametrize(
    ("extra", "mla", "before", "since"),
    [
        ({}, False, "HND", "LBHNC"),
        ({"mode": "push"}, False, "HND", "LBHNC"),
        ({"outermost": "layer"}, False, "HND", "LBHNC"),
        ({"outermost": "block"}, False, "HND", "BLHNC"),
        ({}, True, None, None),
        ({"outermost": "block"}, True, None, "BLHNC"),
    ],
)
def test_heads_come_before_tokens_and_layers_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], mla: bool, before: str | None, since: str | None
) -> None:
    settings = read_settings(extra)
    for names_layers, expected in ((False, before), (True, since)):
        monkeypatch.setattr(versions, "_names_layers", lambda known=names_layers: known)
        assert required_layout(configured(mla=mla), settings) == expected


def test_nothing_is_asked_without_a_model() -> None:
    assert required_layout(SimpleNamespace(model_config=None), read_settings({})) is None


@pytest.mark.parametrize(
    ("extra", "joined"),
    [
        ({}, True),
        ({"mode": "push"}, False),
        ({"mode": "push", "outermost": "block"}, True),
        ({"outermost": "layer"}, False),
    ],
)
def test_builds_that_can_only_be_asked_to_join_layers_are_for_pulls(
    extra: dict[str, Any], joined: bool
) -> None:
    assert joins_layers(read_settings(extra)) is joined


def test_the_facts_say_how_much_of_a_prompt_is_left_to_decoders() -> None:
    settings, safe = read_settings({"weights": "off"}), Safety("request")
    assert lookahead_of(engine_facts(split(1), (), settings, 3, safe, 2).facts) == 2
    assert LOOKAHEAD not in engine_facts(split(1), (), settings, 3, safe).facts


def test_sleep_mode_needs_a_vllm_that_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    awake = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
    sleeps = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))

    monkeypatch.setattr(versions, "tells_of_sleep", lambda: False)
    check_sleep(awake)
    with pytest.raises(UnsupportedBuild, match=r"--enable-sleep-mode: vLLM .* use vLLM 0.33 or later"):
        check_sleep(sleeps)

    monkeypatch.setattr(versions, "tells_of_sleep", lambda: True)
    check_sleep(sleeps)


def split(stages: int) -> Any:
    """An engine of three layers with so many pipeline stages."""
    text = SimpleNamespace(num_hidden_layers=3)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text,
            hf_config=text,
            model="m",
            dtype="float32",
            get_total_num_kv_heads=lambda: 4,
            get_head_size=lambda: 32,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, tensor_parallel_size=1, decode_context_parallel_size=1
        ),
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_role="kv_both"),
    )


def test_pipeline_stages_of_unlike_many_layers_say_the_same_of_their_engine() -> None:
    settings, safe = read_settings({"weights": "off"}), Safety("request")
    here, there = (engine_facts(split(2), (), settings, layers, safe) for layers in (2, 1))
    assert contradiction(here, there) is None
    assert here.world_size == 2
    assert engine_facts(split(1), (), settings, 3, safe).facts["layers"] == 3


def on_node(rank: int, nodes: int = 2) -> Any:
    """What vLLM's ParallelConfig says on one of its nodes."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            nnodes_within_dp=nodes, node_rank_within_dp=rank, master_addr="10.0.0.1"
        )
    )


@pytest.mark.parametrize(
    ("extra", "config", "home"),
    [
        ({}, on_node(0, nodes=1), "auto"),
        ({}, SimpleNamespace(parallel_config=SimpleNamespace()), "auto"),
        ({}, on_node(0), "here"),
        ({}, on_node(1), "10.0.0.1"),
        ({"home": "head:7766"}, on_node(1), "head:7766"),
        ({"home": "head:7766"}, on_node(0, nodes=1), "head:7766"),
    ],
)
def test_the_home_is_vllm_s_master_where_it_has_several_nodes(
    extra: dict[str, Any], config: Any, home: str
) -> None:
    assert several_hosts(config, read_settings(extra)).home == home


def test_workers_on_several_hosts_take_the_engine_id_and_the_name_of_the_model_of_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stages of two ranks, a stage a node: what the first rank has goes through both kinds of groups."""
    ids = {(pp, tp): f"node{pp}" for pp in range(2) for tp in range(2)}
    said: dict[tuple[str, int], tuple[str, str]] = {}

    class Group:
        """A process group as the worker at that place has it; its first rank speaks before the others hear."""

        def __init__(self, name: str, group: int, *, first: bool) -> None:
            self.group, self.first = (name, group), first

        def broadcast_object(self, given: tuple[str, str], src: int) -> tuple[str, str]:
            assert src == 0
            return said.setdefault(self.group, given) if self.first else said[self.group]

    def engine_of(pp: int, tp: int) -> EngineFacts:
        state = ModuleType("vllm.distributed.parallel_state")
        state.get_tp_group = lambda: Group("tp", pp, first=tp == 0)  # type: ignore[attr-defined]
        state.get_pp_group = lambda: Group("pp", tp, first=pp == 0)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, state.__name__, state)
        return one_engine(on_node(pp), EngineFacts(engine_id=ids[pp, tp], model=f"/models/of-node{pp}"))

    found = [engine_of(*place) for place in ids]
    assert {(engine.engine_id, engine.model) for engine in found} == {("node0", "/models/of-node0")}


def test_an_engine_on_one_host_keeps_its_id_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", None)
    assert one_engine(on_node(0, nodes=1), EngineFacts(engine_id="e", model="m")).engine_id == "e"


@pytest.mark.parametrize(("dtype", "packing"), [("bfloat16", "amx"), ("float32", "vec")])
def test_how_a_cpu_packs_blocks_goes_by_the_type_of_the_model_not_of_its_cache(
    monkeypatch: pytest.MonkeyPatch, dtype: str, packing: str
) -> None:
    """As vLLM chooses: AMX for bfloat16, with a quantised cache too."""
    attention = ModuleType("vllm.v1.attention.backends.cpu_attn")
    kernels = lambda of, tokens, size: "amx" if of == "bfloat16" else "vec"  # noqa: ARG005, E731
    attention._get_attn_isa = kernels  # type: ignore[attr-defined]
    state = ModuleType("vllm.distributed.parallel_state")
    state.get_pp_group = lambda: SimpleNamespace(rank_in_group=0)  # type: ignore[attr-defined]
    state.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    for module in (attention, state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(
            dtype=dtype, hf_text_config=SimpleNamespace(), get_total_num_kv_heads=lambda: 4
        ),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    packs = place(config).packing
    assert packs is not None
    assert packs(SimpleNamespace(dtype="float8_e4m3fn", head_size=64), 32) == packing


def drafting(ahead: int, *groups: Any) -> tuple[Any, Any]:
    """A vLLM whose drafter reads so far ahead, and its groups."""
    return (
        SimpleNamespace(num_prefill_lookahead_tokens=ahead),
        SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups]),
    )


def test_a_prefiller_leaves_out_what_a_drafter_of_several_modules_has_only_guessed() -> None:
    full, rebuilt = SimpleNamespace(), SimpleNamespace(prefix_replay_tokens=128)
    assert lookahead(*drafting(0, full)) == 0
    assert lookahead(*drafting(1, full)) == 0
    assert lookahead(*drafting(3, full)) == 2
    assert lookahead(*drafting(0, full, rebuilt)) == 1
    assert lookahead(*drafting(3, full, rebuilt)) == 2
    assert lookahead(SimpleNamespace(), drafting(0, full)[1]) == 0
