"""The models that are measured: for GPUs one of each kind of KV cache, on CPUs the tiny ones of the tests."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.demo.kinds import SHARED, Gains, TinyModel
from kvctl.demo.models import write_model, write_tokenizer
from tests.support.tiny_models import MODELS

MOST_TOKENS = 65536
"""Positions that the models for GPUs know."""
MADE_UP = {"load_format": "dummy"}
"""vLLM's argument for a model whose weights are too large to be written: each engine makes up the same ones."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model as it is run here.

    ``model`` is its name below or in `tests.support.tiny_models`. ``token_bytes`` is what a token's KV takes at
    least, for choosing cache sizes. ``several_groups``: older builds need another scheduler on a decoder of it.
    ``arguments`` are vLLM's that it needs.
    """

    name: str
    model: str
    dtype: str
    token_bytes: int
    several_groups: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def of_device(device: str) -> dict[str, Kind]:
    """The kinds for ``cuda`` or ``cpu``, by name."""
    found = _GPU if device == "cuda" else _CPU
    return {kind.name: kind for kind in found}


def write(kind: Kind, folder: Path) -> Path:
    """Write a kind's model below ``folder``, with its weights unless vLLM is to make them up; its own folder."""
    model = (MODELS | _GPU_MODELS)[kind.model]
    made_up = kind.arguments.items() >= MADE_UP.items()
    return write_without_weights(model, folder) if made_up else write_model(model, folder)


def write_without_weights(model: TinyModel, folder: Path) -> Path:
    """Write a model's configuration and tokenizer for engines with `MADE_UP` unless they are there; its own folder.

    The configuration comes last: where it stands all does, and other engines may read it.
    """
    path = folder / model.name
    if (path / "config.json").exists():
        return path
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    config = getattr(transformers, model.architecture)(**(SHARED | model.config))
    with torch.device("meta"):
        config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    config.dtype = getattr(torch, model.dtype)
    write_tokenizer(path)
    config.save_pretrained(path)
    return path


def _gpu(name: str, like: str, config: dict[str, Any], gains: Gains | None = None) -> TinyModel:
    """A model of bfloat16 that is made like a tiny one."""
    tiny = MODELS[like]
    whole = {"max_position_embeddings": MOST_TOKENS, "hidden_size": 256, "intermediate_size": 512}
    return dataclasses.replace(
        tiny,
        name=name,
        dtype="bfloat16",
        config=tiny.config | whole | config,
        gains=gains or tiny.gains,
    )


_DENSE = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

_GPU_LIST = (
    _gpu("gpu-dense", "qwen3", _DENSE),
    # As wide as Llama-3.1-8B, with half its layers: a prefill takes the GPU longer than its launches take the CPU.
    _gpu(
        "gpu-wide",
        "qwen3",
        _DENSE | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    ),
    _gpu("gpu-gemma3", "gemma3", {"sliding_window": 512}),
    _gpu(
        "gpu-mla",
        "deepseek-v2",
        {"num_attention_heads": 16, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128},
    ),
    _gpu(
        "gpu-mamba2",
        "granite-hybrid",
        {"shared_intermediate_size": 512, "mamba_d_head": 64, "mamba_d_state": 128},
    ),
    _gpu(
        "gpu-gdn",
        "qwen3-next",
        {"head_dim": 128, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
)
_GPU_MODELS = {model.name: model for model in _GPU_LIST}

_GPU = (
    Kind("dense", "gpu-dense", "bfloat16", 1 << 16),
    Kind("wide", "gpu-wide", "bfloat16", 1 << 16, arguments=MADE_UP),
    Kind("gemma3", "gpu-gemma3", "bfloat16", 3 << 10, several_groups=True),
    Kind("mla", "gpu-mla", "bfloat16", 3456),
    # The same with other attention kernels than vLLM takes by itself.
    Kind("dense-triton", "gpu-dense", "bfloat16", 1 << 16, arguments={"attention_backend": "TRITON_ATTN"}),
    Kind("mla-flashmla", "gpu-mla", "bfloat16", 3456, arguments={"attention_backend": "FLASHMLA"}),
    Kind("gdn", "gpu-gdn", "bfloat16", 16 << 10, True, arguments={"gdn_prefill_backend": "triton"}),
    Kind("mamba2", "gpu-mamba2", "bfloat16", 16 << 10, True),
)
_CPU = (
    Kind("dense", "qwen3", "float32", 1536),
    Kind("wide", "qwen3", "float32", 1536),
    Kind("gemma3", "gemma3", "float32", 6 << 10, several_groups=True),
    Kind("mla", "deepseek-v2", "float32", 7 << 10),
    Kind("gdn", "qwen3.5-gdn", "bfloat16", 16 << 10, True),
    Kind("mamba2", "granite-hybrid", "float32", 16 << 10, True),
)
