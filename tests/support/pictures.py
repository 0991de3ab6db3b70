"""A tiny model that sees pictures, and pictures for it: a Llama of `tests.support.tiny_models` behind a tiny CLIP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIDE = 56
"""Pixels of a picture's side."""
PATCH = 14
PATCHES = (SIDE // PATCH) ** 2
PICTURE_TOKENS = PATCHES
"""A picture is so many tokens of a prompt, which names it by one."""
PLACE = 511
"""The token that stands for a picture: the tiny models' last one, which no prompt of the tests has."""
WIDTH = 64


def add_sight(path: Path) -> None:
    """Make LLaVA of the Llama in that folder: what is drawn decides what is said as much as any token does."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CLIPVisionConfig, CLIPVisionModel, LlavaConfig

    weights, config = path / "model.safetensors", path / "config.json"
    text = json.loads(config.read_text())
    sight = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    torch.manual_seed(PLACE)
    tensors = {
        name.replace("model.", "language_model.model.", 1)
        if name.startswith("model.")
        else f"language_model.{name}": tensor
        for name, tensor in load_file(weights).items()
    }
    for name, tensor in CLIPVisionModel(sight).state_dict().items():
        bare = name.removeprefix("vision_model.")
        if not bare.startswith("post_layernorm."):  # LLaVA takes what stands before it
            tensors[f"vision_tower.vision_model.{bare}"] = tensor.contiguous()
    for name, columns in (("linear_1", WIDTH), ("linear_2", text["hidden_size"])):
        rows = text["hidden_size"]
        tensors[f"multi_modal_projector.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
        tensors[f"multi_modal_projector.{name}.bias"] = torch.zeros(rows)
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, weights, {"format": "pt"}
    )
    whole = LlavaConfig(
        vision_config=sight,
        text_config=text,
        image_token_index=PLACE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
    ).to_dict()
    named = {"architectures": ["LlavaForConditionalGeneration"], "dtype": text["dtype"]}
    config.write_text(json.dumps(whole | named, default=str))
    _write_processor(path)


def _write_processor(path: Path) -> None:
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens([f"<{PLACE}>"], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(f"<{PLACE}>") == PLACE
    size = {"height": SIDE, "width": SIDE}
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=f"<{PLACE}>",
        num_additional_image_tokens=1,
    ).save_pretrained(path)


def with_picture(prompt: list[int], seed: int) -> dict[str, Any]:
    """A prompt as vLLM takes it, with a picture of noise behind its first token where there is a seed."""
    if not seed:
        return {"prompt_token_ids": prompt}
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    tokens = [*prompt[:1], PLACE, *prompt[1:]]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": Image.fromarray(noise)}}
