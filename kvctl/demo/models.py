"""Writes tiny models with made-up weights: a few megabytes each, nothing to download.

An end-to-end test of a KV transfer compares the outputs of two runs, so it proves something only if a wrong byte in
the cache changes the output. Freshly initialised models fail at that: they answer the same to every prompt, or look
at the last tokens only. The weights here are drawn so that early tokens matter as much as late ones:

* embeddings are centred over the vocabulary and small beside what attention adds, so that the context decides;
* queries and keys are large enough for attention to pick tokens instead of averaging all of them away;
* recurrent states decay over thousands of tokens (`decay`), and nothing bypasses them (Mamba's `D` is 0).
"""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

from kvctl.demo.kinds import SHARED, VOCABULARY, Gains, TinyModel

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SEED = 7
MARK = "kvctl-model.json"
"""Written last into a model's folder: says which model, and which edition of its weights, is complete there."""
EDITION = 1


def prompt(seed: int, length: int) -> list[int]:
    """A reproducible prompt: `length` token ids without special tokens."""
    source = random.Random(seed)  # noqa: S311 - reproducible on purpose
    return [source.randrange(len(SPECIAL_TOKENS), VOCABULARY) for _ in range(length)]


def write_model(model: TinyModel, folder: Path) -> Path:
    """Write a model and its tokenizer below `folder` unless they are there; return the model's own folder.

    The same model gets the same weights everywhere. Takes a few seconds, most of it to import torch.
    """
    path = folder / model.name
    mark = path / MARK
    contents = json.dumps({"model": model.name, "edition": EDITION})
    if mark.exists() and mark.read_text() == contents:
        return path
    # Nothing here is fetched; said before the import, since the library reads it once.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    config = getattr(transformers, model.architecture)(**(SHARED | model.config))
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(network, model.gains)
    # Stored in half the size; each value is exact in float32 as well.
    network.to(torch.bfloat16)
    network.config.dtype = getattr(torch, model.dtype)
    network.save_pretrained(path)
    config_file = path / "config.json"
    written = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(written | {"dtype": model.dtype}, indent=2) + "\n")
    write_tokenizer(path)
    mark.write_text(contents)
    return path


def _fill(network: Any, gains: Gains) -> None:
    """Draw every parameter of a network anew, by its name."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            owner, kind = path.split(".")[-2:]
            # Drawn for every parameter, so that one more or less leaves the others as they are.
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" not in owner:
                parameter.copy_(_drawn(owner, kind, noise, gains))
            elif owner in ("q_norm", "k_norm"):
                parameter.fill_(gains.norm)


def _drawn(owner: str, kind: str, noise: Any, gains: Gains) -> Any:
    """The values of one parameter; `noise` is normal noise of its shape."""
    if kind == "A_log":
        return noise * 0 + math.log(gains.decay)
    if kind in ("D", "dt_bias", "bias"):
        return noise * 0
    if owner == "embed_tokens":
        return (noise - noise.mean(0)) * gains.embedding
    if owner == "conv1d":
        return noise * 0.6
    return noise * _gain(owner, gains) / math.sqrt(noise.shape[-1])


def _gain(owner: str, gains: Gains) -> float:
    match owner:
        case "q_proj" | "k_proj" | "kv_a_proj_with_mqa":
            return gains.query_key
        case "v_proj" | "kv_b_proj" | "in_proj_qkv" | "in_proj_qkvz" | "in_proj_z" | "in_proj":
            return gains.value
        case "o_proj" | "out_proj":
            return gains.output
        case "in_proj_a" | "in_proj_ba":
            return gains.decay_input
        case "in_proj_b" | "lm_head":
            return 1.0
        case _:
            return gains.mlp


def write_tokenizer(path: Path) -> None:
    """A tokenizer of single bytes, filled up to the vocabulary's size with names that no text contains."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<{number}>" for number in range(len(tokens), VOCABULARY)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=SHARED["max_position_embeddings"],
        **SPECIAL_TOKENS,
    ).save_pretrained(path)
