"""Tiny LoRA adapters for the tiny models, with noise in them that changes every answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RANK = 4
MODULES = ("q_proj", "v_proj")


def write_adapter(model: Path, folder: Path, seed: int = 0) -> Path:
    """An adapter for the model in that folder, of all its attention layers."""
    from safetensors.numpy import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    rows = {"q_proj": heads * size, "v_proj": config["num_key_value_heads"] * size}
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((RANK, hidden)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((rows[module], RANK)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8 * RANK,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder
