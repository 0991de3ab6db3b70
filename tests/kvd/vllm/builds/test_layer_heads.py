"""Heads of layers that are not the model's: told by vLLM's marks, by names, and by what it says of each layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.builds.layer_heads import layer_heads


class Architecture:
    """vLLM's ModelArchitectureConfig of a model whose layers have these heads."""

    def __init__(self, *heads: int) -> None:
        self.heads = heads
        self.per_layer_overrides: list[dict[str, Any]] | None = (
            [{} for _ in heads] if len(set(heads)) > 1 else None
        )

    def __getitem__(self, layer: int) -> Any:
        return SimpleNamespace(total_num_kv_heads=self.heads[layer])


def config(*names: str, drafter: int | None = 2, marked: tuple[str, ...] = (), **model: Any) -> Any:
    """A model of 4 layers with 8 heads, with a drafter of that many."""
    context = {name: SimpleNamespace(is_draft_layer=name in marked) for name in names}
    draft = SimpleNamespace(get_total_num_kv_heads=lambda: drafter)
    speculative = SimpleNamespace(draft_model_config=draft if drafter is not None else None)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        speculative_config=speculative,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=4), **model),
    )


OF_THE_MODEL = "model.layers.3.self_attn.attn"


@pytest.mark.parametrize(
    "name",
    [
        "draft_model.model.layers.0.self_attn.attn",
        "model.layers.4.self_attn.attn",
        "language_model.model.layers.4.self_attn.attn",
        "mtp.layers.0.self_attn.attn",
        "model.mtp_layers.0.self_attn.attn",
        "model.mtp_block.self_attn.attn",
    ],
)
def test_a_drafter_s_layer_is_told_by_its_name(name: str) -> None:
    assert layer_heads(config(OF_THE_MODEL, name)) == {name: 2}


def test_a_drafter_s_layer_is_told_by_vllm_s_mark() -> None:
    name = "model.layers.0.self_attn.drafting"
    assert layer_heads(config(OF_THE_MODEL, name, marked=(name,))) == {name: 2}


def test_without_a_drafter_of_its_own_every_layer_is_the_model_s() -> None:
    assert layer_heads(config(OF_THE_MODEL, "model.layers.4.attn", drafter=None)) == {}
    assert layer_heads(SimpleNamespace(model_config=SimpleNamespace(hf_text_config=None))) == {}


def test_a_drafter_without_heads_says_nothing() -> None:
    assert layer_heads(config("mtp.layers.0.mixer", drafter=0)) == {}


def test_layers_of_one_model_may_have_unlike_heads() -> None:
    names = [f"model.layers.{number}.self_attn.attn" for number in range(5)]
    found = layer_heads(config(*names, model_arch_config=Architecture(8, 8, 4, 8)))
    assert found == dict(zip(names, (8, 8, 4, 8, 2), strict=True))
    assert layer_heads(config(*names[:4], model_arch_config=Architecture(8, 8, 8, 8))) == {}
