"""The models that benchmarks/gpu writes for engines that make up their weights."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.models import MADE_UP, of_device, write


def test_a_model_without_weights_is_what_vllm_needs_to_make_them_up(tmp_path: Path) -> None:
    kind = of_device("cuda")["wide"]
    assert kind.arguments == MADE_UP
    folder = write(kind, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"], config["dtype"]) == (4096, 14336, "bfloat16")
    assert (folder / "tokenizer.json").exists()
    assert not list(folder.glob("*.safetensors"))
