"""Tiny LoRA adapters for the tiny models, with noise in them that changes every answer."""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvctl.demo.engine import EngineAnswer, EngineProcess
from kvctl.demo.engine_host import answer

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


def answered(
    engine: EngineProcess,
    prompt: Sequence[int],
    max_tokens: int,
    params: Mapping[str, Any] | None = None,
    adapter: Path | None = None,
) -> EngineAnswer:
    """The engine's answer, with the adapter in that folder if any."""
    if adapter is None:
        return engine.submit(prompt, max_tokens, params).result(120)
    command = {
        "id": f"adapted-{uuid.uuid4().hex}",
        "prompt_token_ids": prompt,
        "max_tokens": max_tokens,
        "kv_transfer_params": params,
        "first_token": None,
    }
    said = engine.call(f"{__name__}:_answer", str(adapter), command).result(120)
    return EngineAnswer(**said | {"token_ids": tuple(said["token_ids"])})


async def _answer(engine: Any, adapter: str, command: dict[str, Any]) -> dict[str, Any]:
    """Runs in the engine's host. vLLM knows an adapter by a number of its own."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest(Path(adapter).name, 1 + zlib.crc32(adapter.encode()) % 10_000, adapter)
    return await answer(engine, command, lora)
