"""The compatibility class: engines that share one fit, whatever they are cut into; what makes it another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.geometry.content import content_of
from kvd.geometry.model import EngineGeometry
from kvd.topology.compat import FactValue, compare, compatible
from kvd.topology.compatibility_class import compatibility_class
from tests.kvd.topology.test_oracle import BLOCKS, THOROUGH
from tests.support import random_engines as engines
from tests.support.samples import GroupParts, engine, llama

FACTS: dict[str, tuple[str | int | bool, ...]] = {
    "weights": ("w1-0123456789abcdef", "w1-fedcba9876543210", "v1-0123456789abcdef"),
    "config": ("c1-0123456789abcdef", "v1-0123456789abcdef"),
    "weights_source": ("files", "setting"),
    "dtype": ("bfloat16", "float16"),
    "cache_dtype": ("auto", "bfloat16", "bf16", "fp8", "float8_e4m3"),
    "backend": ("nixl", "mooncake"),
    "transfer_mode": ("pull", "push"),
    "layout": ("HND", "NHD"),
    "vllm_version": ("0.31.0", "0.32.0"),
    "kv_heads": (4, 8),
}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[EngineGeometry, EngineGeometry]:
    """Two engines of one model or of two, with facts that one of them may not tell."""
    model = draw(engines.models())
    other = model if draw(st.integers(0, 3)) else draw(engines.models())
    made = []
    for name, kinds in (("local", model), ("remote", other)):
        facts: dict[str, FactValue] = {
            fact: draw(st.sampled_from(values)) for fact, values in FACTS.items() if draw(st.integers(0, 3))
        }
        one = engines.engine(draw, name, kinds, BLOCKS)
        made.append(
            replace(one, model=draw(st.sampled_from(("a/random", "/m/Random", "other"))), facts=facts)
        )
    if not draw(st.integers(0, 2)):
        made[1] = replace(made[1], facts=made[0].facts, model=made[0].model)
    return made[0], made[1]


@pytest.mark.timeout(600)
@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(pairs())
def test_engines_of_one_class_fit(pair: tuple[EngineGeometry, EngineGeometry]) -> None:
    local, remote = pair
    assert compatibility_class(local)
    if compatibility_class(local) == compatibility_class(remote):
        assert [f for f in compare(local, remote) if not f.ok] == []
        assert [f for f in compare(remote, local) if not f.ok] == []


@st.composite
def twins(draw: st.DrawFn) -> tuple[EngineGeometry, EngineGeometry]:
    """Two engines of one model, whatever they are cut into."""
    model = draw(engines.models())
    return engines.engine(draw, "one", model, BLOCKS), engines.engine(draw, "other", model, BLOCKS)


@pytest.mark.timeout(600)
@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(twins())
def test_sizes_layouts_and_blocks_make_no_other_class(pair: tuple[EngineGeometry, EngineGeometry]) -> None:
    one, other = pair
    assert compatibility_class(one) == compatibility_class(other)
    assert compatible(compare(one, other))


FULL: GroupParts = ("full", 16, None, llama(("layers.0",)))
WINDOW: GroupParts = ("sliding_window", 16, 128, llama(("layers.0",)))


def named(**facts: str) -> str:
    return compatibility_class(engine("e", FULL, **facts))  # type: ignore[arg-type]


def test_what_is_fatal_makes_another_class_and_what_is_not_does_not() -> None:
    plain = named(backend="nixl", dtype="bfloat16", cache_dtype="auto", layout="HND")
    assert plain.startswith("k1-")
    assert plain == named(backend="nixl", dtype="bfloat16", cache_dtype="bf16", layout="NHD")
    others = {
        named(backend="direct", dtype="bfloat16", cache_dtype="auto"),
        named(backend="nixl", dtype="float16", cache_dtype="auto"),
        named(backend="nixl", dtype="bfloat16", cache_dtype="fp8"),
        named(backend="nixl", dtype="bfloat16", cache_dtype="auto", weights="w1-0123456789abcdef"),
    }
    assert len(others | {plain}) == 5


def test_names_do_not_decide_where_weights_do() -> None:
    here, there = (
        replace(engine("e", FULL, weights="w1-0123456789abcdef"), model=model) for model in ("a", "b")
    )
    assert compatibility_class(here) == compatibility_class(there)
    bare = replace(here, facts={})
    assert compatibility_class(bare) != compatibility_class(replace(bare, model="b"))
    assert compatibility_class(bare) == compatibility_class(replace(bare, model="/m/A/"))


def test_a_window_makes_another_class() -> None:
    assert compatibility_class(engine("e", FULL)) != compatibility_class(engine("e", WINDOW))


def test_an_engine_that_is_not_complete_has_none() -> None:
    whole = engine("e", FULL)
    assert compatibility_class(replace(whole, workers=())) == ""
    assert compatibility_class(replace(whole, tp=2, workers=whole.workers[:1])) == ""
    assert content_of(()) == 0
