"""One model's configuration is one, however it was written; what changes KV changes it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.weights.configuration import canonical, digest_configuration, merged
from kvd.weights.errors import WeightsUnreadable

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "transformers_version": "4.43.0",
    "use_cache": True,
    "attention_dropout": 0.0,
}
SAME: list[dict[str, Any]] = [
    {"transformers_version": "5.2.0", "_name_or_path": "/m/llama"},
    {"torch_dtype": None, "dtype": "float32"},
    {"eos_token_id": [1, 2], "tokenizer_class": "X", "use_cache": False, "attention_dropout": 0.1},
    {"hidden_size": 4096.0, "rope_theta": 500000, "head_dim": None},
    {"rope_scaling": {"type": "llama3", "factor": 8, "original_max_position_embeddings": 8192}},
    {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "original_max_position_embeddings": 8192, "factor": 8.0, "rope_type": "llama3", "rope_theta": 500000.0,
        },
    },
]  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_scaling": None},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}},
    {"rms_norm_eps": 1e-6},
    {"sliding_window": 4096},
    {"architectures": ["MistralForCausalLM"]},
    {"attention_bias": False},
    {"quantization_config": {"quant_method": "fp8"}},
    {"text_config": {"num_hidden_layers": 16}},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize("change", SAME)
def test_what_has_no_bearing_on_kv_and_other_spellings_are_the_same(change: dict[str, Any]) -> None:
    assert digest_configuration(LLAMA | change) == digest_configuration(LLAMA)
    nested = {"text_config": LLAMA | change}
    assert digest_configuration(nested) == digest_configuration({"text_config": LLAMA})


def test_what_changes_kv_is_another_configuration() -> None:
    made = {digest_configuration(LLAMA | change) for change in [{}, *OTHERS]}
    assert len(made) == len(OTHERS) + 1


def test_rotary_embeddings_by_kind_of_layer_are_left_as_they_are() -> None:
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert canonical({"rope_parameters": rope}) != canonical(
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    )
    assert canonical({"rope_parameters": rope}).keys() == {"rope_parameters"}


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=6), st.randoms())
def test_the_order_of_keys_does_not_matter(config: dict[str, Any], source: random.Random) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(inner)) for key, inner in value.items()]
            source.shuffle(items)
            return dict(items)
        return [shuffled(inner) for inner in value] if isinstance(value, list) else value

    assert digest_configuration(shuffled(config)) == digest_configuration(config)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=6))
def test_what_was_read_from_a_file_is_what_was_written(config: dict[str, Any]) -> None:
    assert digest_configuration(json.loads(json.dumps(config))) == digest_configuration(config)


def test_objects_of_libraries_have_a_digest() -> None:
    assert digest_configuration({"a": {3, 1}, "b": object, "c": (1, 2)})
    assert digest_configuration({"a": {3, 1}}) == digest_configuration({"a": {1, 3}})


def test_overrides_take_the_place_of_entries_at_any_depth() -> None:
    over = merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "e": 5})
    assert over == {"a": {"b": 4, "c": 2}, "d": 3, "e": 5}


def test_one_that_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(WeightsUnreadable, match="nested too deeply"):
        digest_configuration(deep)
