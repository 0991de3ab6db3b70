"""Tiny models that one test needs, besides those of `tests.support.tiny_models`: drafters, and one with experts.

Guesses of a drafter are noise. What matters is that it has a cache of its own, which has to move with the model's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvctl.demo import models
from kvctl.demo.kinds import TinyModel
from tests.support.pictures import add_sight
from tests.support.tiny_models import MODELS, write_model

PREDICTED = "model.mtp_layers.0."
LLAMA = MODELS["llama"]
EAGLE = dataclasses.replace(LLAMA, name="eagle", config=LLAMA.config | {"num_hidden_layers": 1})
QWEN2 = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
PREDICTING = dataclasses.replace(LLAMA, name="predicting", architecture="Qwen2Config", config=QWEN2)
SEEING = dataclasses.replace(LLAMA, name="llava")
EXPERTS = dataclasses.replace(
    LLAMA,
    name="experts",
    architecture="Qwen3MoeConfig",
    config=LLAMA.config
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
)


def dtype_of(name: str) -> str:
    """The type to run a model in."""
    return MODELS[name].dtype if name in MODELS else LLAMA.dtype


def write(name: str, folder: Path) -> Path:
    """Write a tiny model of any kind by its name into a new folder; return its own."""
    if name in MODELS:
        return write_model(name, folder)
    model, finish = ODD[name]
    path = models.write_model(model, folder)
    finish(path)
    return path


def _as_it_is(path: Path) -> None:
    pass


def _eagle(path: Path) -> None:
    """What is written is a Llama of one layer; of that EAGLE takes the layer, and a matrix before it."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = path / "model.safetensors"
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(weights).items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    width = tensors["layers.0.mlp.down_proj.weight"].shape[0]
    tensors["fc.weight"] = _noise(torch, width, 2 * width)
    save_file(tensors, weights, {"format": "pt"})


def _predicting(path: Path) -> None:
    """One more layer that predicts the token after the next, as MiMo has it."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, config = path / "model.safetensors", path / "config.json"
    tensors = load_file(weights)
    width = tensors["model.norm.weight"].shape[0]
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.0."):
            tensors[PREDICTED + name.removeprefix("model.layers.0.")] = tensor.clone()
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{PREDICTED}{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    tensors[f"{PREDICTED}input_proj.weight"] = _noise(torch, width, 2 * width)
    save_file(tensors, weights, {"format": "pt"})
    named = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))


def _noise(torch: Any, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(models.SEED)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)


ODD: dict[str, tuple[TinyModel, Callable[[Path], None]]] = {
    EAGLE.name: (EAGLE, _eagle),
    PREDICTING.name: (PREDICTING, _predicting),
    EXPERTS.name: (EXPERTS, _as_it_is),
    SEEING.name: (SEEING, add_sight),
}
