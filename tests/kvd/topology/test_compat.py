"""`compare`: each factor by itself, what is fatal and what only costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.geometry.model import EngineGeometry
from kvd.topology.compat import FACT_RULES, Factor, compare, compatible
from tests.support.samples import engine, gated_delta_net, llama

FULL = ("full", 16, None, llama(("layers.0",)))
FACTS: dict[str, str | int] = {
    "dtype": "bfloat16",
    "cache_dtype": "auto",
    "kv_heads": 8,
    "backend": "nixl",
    "transfer_mode": "pull",
    "vllm_version": "0.32.0",
    "layout": "HND",
}


def pair(**changes: str | int) -> tuple[EngineGeometry, EngineGeometry]:
    local = engine("d", FULL, **FACTS)  # type: ignore[arg-type]
    return local, engine("p", FULL, **{**FACTS, **changes})  # type: ignore[arg-type]


def factor(factors: tuple[Factor, ...], name: str) -> Factor:
    return next(f for f in factors if f.name == name)


def test_equal_engines_agree_in_everything() -> None:
    factors = compare(*pair())
    assert compatible(factors)
    assert all(f.note == "" for f in factors)


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_dtype", "fp8"), ("kv_heads", 4), ("backend", "mooncake"), ("transfer_mode", "push")],
)
def test_fatal_differences_name_both_values(name: str, value: str | int) -> None:
    found = factor(compare(*pair(**{name: value})), name)
    assert (found.ok, found.fatal, found.local, found.remote) == (False, True, str(FACTS[name]), str(value))
    assert found.note


@pytest.mark.parametrize(
    ("name", "value"), [("layout", "NHD"), ("vllm_version", "0.33.0"), ("dtype", "float16")]
)
def test_handled_differences_tell_their_cost(name: str, value: str) -> None:
    # With dtype, what "auto" means changes too: give both sides their cache type.
    local, remote = pair(**{name: value, "cache_dtype": "bfloat16"})
    found = factor(compare(local, remote), name)
    assert (found.ok, found.fatal) == (True, False)
    assert found.note
    assert compatible(compare(local, remote))


def test_auto_is_the_type_that_it_stands_for() -> None:
    found = factor(compare(*pair(cache_dtype="bfloat16")), "cache_dtype")
    assert found.ok
    assert not found.same


def test_a_model_is_known_by_its_last_name() -> None:
    local, remote = (
        replace(e, model=m)
        for e, m in zip(pair(), ("meta-llama/Llama-3.1-8B", "/m/Llama-3.1-8B/"), strict=True)
    )
    assert factor(compare(local, remote), "model").ok
    assert not factor(compare(local, replace(remote, model="Qwen3-8B")), "model").ok


def test_facts_of_one_side_are_shown_and_harmless() -> None:
    local, remote = pair()
    found = factor(
        compare(replace(local, facts={**local.facts, "speculative_tokens": 2}), remote), "speculative_tokens"
    )
    assert (found.local, found.remote, found.ok) == ("2", "unknown", True)


def test_facts_without_a_rule_are_shown() -> None:
    found = factor(compare(*pair(rack="b7")), "rack")
    assert (found.local, found.remote, found.ok) == ("unknown", "b7", True)


def test_a_plan_that_cannot_be_made_is_a_factor() -> None:
    local = engine("d", ("full", 16, None, llama(("layers.0", "layers.1"))))
    remote = engine("p", FULL)  # type: ignore[arg-type]
    factors = compare(local, remote)
    assert not factor(factors, "layer names").ok
    assert "layers.1" in factor(factors, "plan").note


def test_attention_here_and_a_state_there() -> None:
    local = engine("d", FULL)  # type: ignore[arg-type]
    remote = engine("p", ("mamba", 640, None, gated_delta_net(("layers.0",))))
    found = factor(compare(local, remote), "plan")
    assert not found.ok
    assert "full" in found.note
    assert "mamba" in found.note


def test_full_attention_cannot_be_read_from_a_window() -> None:
    local = engine("d", FULL)  # type: ignore[arg-type]
    remote = engine("p", ("sliding_window", 16, 128, llama(("layers.0",))))
    assert not factor(compare(local, remote), "groups").ok
    assert compatible(compare(remote, local))


def test_every_fact_that_the_connector_sends_has_a_rule() -> None:
    assert set(FACT_RULES) >= {
        "model", "config", "weights", "weights_source", "dtype", "quantization", "cache_dtype",
        "kv_heads", "head_size", "layers", "layout", "attention_backend",
        "vllm_version", "connector_version", "backend", "backend_version", "transfer_mode", "speculative_tokens",
        "prefill_lookahead",
        "prefix_caching", "mamba_cache_mode", "load_failure_policy", "hybrid_group_kinds",
    }  # fmt: skip


def test_what_counts_as_a_difference() -> None:
    local, remote = pair(layout="NHD")
    assert {f.name for f in compare(local, remote) if f.differs} == {"layout"}
    assert not any(f.differs for f in compare(*pair()))


def test_figures_that_follow_from_others_are_no_difference_of_their_own() -> None:
    factors = compare(engine("d", FULL, tp=2), engine("p", FULL, tp=4))  # type: ignore[arg-type]
    assert {f.name for f in factors if not f.same} == {"tp", "workers", "plan"}
    assert {f.name for f in factors if f.differs} == {"tp"}


def test_a_fact_that_one_side_leaves_out_is_no_difference() -> None:
    found = factor(compare(engine("d", FULL), engine("p", FULL, backend="nixl")), "backend")  # type: ignore[arg-type]
    assert (found.local, found.remote, found.differs) == ("unknown", "nixl", False)
