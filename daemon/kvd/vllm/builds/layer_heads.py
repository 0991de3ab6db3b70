"""How many KV heads a layer has in all, where that is not what the model has: drafters, and models of unlike layers."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_OF_DRAFTERS = re.compile(r"(?:^|\.)(?:draft_model\.|mtp[._])")
"""Parts of names that vLLM gives layers of drafters only."""


def layer_heads(vllm_config: Any) -> dict[str, int]:
    """By the name of each layer of this process that caches KV: the heads that its own model gives it, on all ranks.

    Layers of which nothing but the model's own number is known are left out.
    """
    context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    drafter = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    model = vllm_config.model_config
    found: dict[str, int] = {}
    for name, layer in context.items():
        if drafter is not None and _is_drafters(name, layer, model):
            found[name] = drafter.get_total_num_kv_heads()
        elif (own := _own_heads(name, model)) is not None:
            found[name] = own
    return {name: heads for name, heads in found.items() if heads > 0}


def _is_drafters(name: str, layer: Any, model: Any) -> bool:
    """Whether a layer is a drafter's. vLLM says so where its newer runner runs; else the name tells.

    Drafters that count on where the model ends begin behind its last layer.
    """
    if getattr(layer, "is_draft_layer", False) or _OF_DRAFTERS.search(name):
        return True
    number = _number(name)
    layers = getattr(model.hf_text_config, "num_hidden_layers", None)
    return number is not None and layers is not None and number >= layers


def _own_heads(name: str, model: Any) -> int | None:
    """What a layer has in a model whose layers differ, None where they do not."""
    architecture, number = getattr(model, "model_arch_config", None), _number(name)
    unlike = getattr(architecture, "per_layer_overrides", None)  # builds before 0.32 have none
    if architecture is None or number is None or not unlike or number >= len(unlike):
        return None
    return int(architecture[number].total_num_kv_heads)


def _number(name: str) -> int | None:
    found = _NUMBER.search(name)
    return int(found[1]) if found else None
