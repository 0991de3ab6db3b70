"""vLLM's KV cache specs, told by the names of their classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.errors import UnsupportedBuild
from kvd.vllm.memory.groups import (
    GroupFacts,
    begins_behind_attention,
    group_facts,
    has_state,
    is_spec,
    layer_spec,
)
from tests.support.rigs.bench import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    HiSparseHotSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    cache_config,
    full,
    gdn,
)


class Unheard(SimpleNamespace):
    pass


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        (full(16), GroupFacts("full", 16)),
        (SinkFullAttentionSpec(block_size=16), GroupFacts("full", 16)),
        (MLAAttentionSpec(block_size=64), GroupFacts("mla", 64)),
        (SlidingWindowSpec(block_size=16, sliding_window=128), GroupFacts("sliding_window", 16, 128)),
        (
            SlidingWindowSpec(block_size=16, sliding_window=128, extra_retained_tokens=8),
            GroupFacts("sliding_window", 16, 136),
        ),
        (ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64), GroupFacts("chunked", 16, 64)),
        (gdn(640), GroupFacts("mamba", 640)),
        (CircularBufferSpec(block_size=8, dcp_sharded=False), GroupFacts("mamba", 8)),
    ],
)
def test_a_spec_in_our_words(spec: Any, facts: GroupFacts) -> None:
    assert group_facts(cache_config(4, (spec, ("l0",)))) == (facts,)


def test_groups_keep_their_order() -> None:
    facts = group_facts(cache_config(4, (gdn(), ("l0",)), (full(), ("l1",))))
    assert [g.kind for g in facts] == ["mamba", "full"]
    assert has_state(facts)
    assert not has_state(facts[1:])


FULL, OTHER_FULL, STATE = full(), full(heads=4), gdn()
WINDOW = SlidingWindowSpec(block_size=4, sliding_window=8)


@pytest.mark.parametrize(
    ("specs", "together"),
    [
        ((STATE, STATE, FULL), True),
        ((STATE, FULL, FULL), True),
        ((STATE, MLAAttentionSpec(block_size=64)), True),
        ((STATE, FULL, OTHER_FULL), True),
        ((STATE, FULL, WINDOW), True),
        ((STATE, WINDOW), False),
        ((STATE,), False),
        ((FULL,), False),
    ],
    ids=lambda value: "+".join(type(s).__name__ for s in value) if isinstance(value, tuple) else str(value),
)
def test_a_load_begins_behind_full_attention_where_there_are_states_beside_it(
    specs: tuple[Any, ...], together: bool
) -> None:
    config = cache_config(4, *((spec, (f"l{i}",)) for i, spec in enumerate(specs)))
    assert begins_behind_attention(group_facts(config)) is together


def test_speculative_blocks_of_a_state_never_move() -> None:
    spec = gdn()
    spec.num_speculative_blocks = 3  # type: ignore[attr-defined]
    assert group_facts(cache_config(4, (spec, ("l0",))))[0].scratch_blocks == 3


def test_context_parallel_ranks_share_a_block_of_attention_but_not_a_state() -> None:
    apart = full(16)
    apart.dcp_sharded = False  # type: ignore[attr-defined]
    config = cache_config(4, (full(16), ("l0",)), (gdn(16), ("l1",)), (apart, ("l2",)))
    assert [g.block_size for g in group_facts(config, dcp=2)] == [32, 16, 16]


def test_a_group_of_like_layers_has_a_spec_for_each() -> None:
    group = SimpleNamespace(
        layer_names=["a", "b"], kv_cache_spec=SimpleNamespace(kv_cache_specs={"a": full(8), "b": full(4)})
    )
    assert layer_spec(group, "b").block_size == 4
    assert is_spec(layer_spec(group, "a"), "AttentionSpec")


@pytest.mark.parametrize("spec", [CrossAttentionSpec(block_size=4), HiSparseHotSpec()])
def test_what_cannot_be_transferred_is_refused_with_its_name_why_and_what_stock_does(spec: Any) -> None:
    with pytest.raises(UnsupportedBuild) as refused:
        group_facts(cache_config(4, (full(), ("l0",)), (spec, ("l1",))))
    said = str(refused.value)
    assert f"KV cache group 1 has a {type(spec).__name__}, which KvdConnector does not transfer: " in said
    assert "stock NixlConnector" in said
    assert "; leave " in said


def test_a_circular_buffer_that_is_spread_over_context_parallel_ranks_is_refused() -> None:
    config = cache_config(4, (full(), ("l0",)), (CircularBufferSpec(block_size=8), ("l1",)))
    assert len(group_facts(config)) == 2
    with pytest.raises(UnsupportedBuild, match=r"group 1 .*--decode-context-parallel-size 2 .*leave the opt"):
        group_facts(config, dcp=2)


def test_an_unknown_spec_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        UnsupportedBuild, match=r"group 0 has a Unheard; known are MambaSpec, .*FullAttentionSpec"
    ):
        group_facts(cache_config(4, (Unheard(), ("l0",))))
