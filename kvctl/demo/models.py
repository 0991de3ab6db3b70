"""Writes tiny models with made-up weights: one of each kind of KV cache, a few megabytes, nothing to download.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 512
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SEED = 7
MARK = "kvctl-model.json"
"""Written last into a model's folder: says which model, and which edition of its weights, is complete there."""
EDITION = 1


@dataclass(frozen=True, slots=True)
class Gains:
    """Scales of the random weights: a matrix with n columns gets entries of size gain / sqrt(n).

    Attributes:
        embedding: size of an embedding's entries, before any factor of the architecture.
        query_key: projections to queries and keys (and MLA's latent).
        value: projections to values, and all inputs of a recurrent layer.
        output: projections from attention or recurrence back to the residual stream.
        mlp: the feed-forward layers.
        norm: excess over 1 of the norms of queries and keys, in architectures that have them.
        decay: upper bound of what a recurrent state loses per token, as a rate.
        decay_input: how much a token may vary that rate.
    """

    embedding: float = 1.0
    query_key: float = 2.0
    value: float = 4.0
    output: float = 1.5
    mlp: float = 1.5
    norm: float = 0.0
    decay: float = 1e-3
    decay_input: float = 1.0


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A kind of model that can be written.

    Attributes:
        name: how commands and tests call it.
        architecture: the configuration class in `transformers`.
        config: its arguments, besides the ones all models share.
        gains: scales of its weights.
        dtype: the type to run it in; outputs are compared bit for bit, so float32 wherever vLLM allows it.
        prefix_caching: whether vLLM can run it with prefix caching on CPU.
        batches: whether vLLM on CPU answers a prompt the same when it computes others in the same step. Where not,
            send one request at a time (`EngineSpec.max_num_seqs=1`).
        cache: what its KV cache consists of, in words.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    gains: Gains
    dtype: str
    prefix_caching: bool
    batches: bool
    cache: str


_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
}

_LIST = (
    TinyModel(
        name="llama",
        architecture="LlamaConfig",
        config={
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
        },
        gains=Gains(),
        dtype="float32",
        prefix_caching=True,
        batches=True,
        cache="full attention with 4 KV heads",
    ),
    TinyModel(
        name="qwen3.5-gdn",
        architecture="Qwen3_5TextConfig",
        config={
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        gains=Gains(embedding=0.4, value=1.5, norm=0.5, decay=3e-4, decay_input=0.3),
        dtype="bfloat16",
        prefix_caching=True,
        batches=True,
        cache="3 layers of gated delta net state, 1 of full attention",
    ),
    TinyModel(
        name="gemma3",
        architecture="Gemma3TextConfig",
        config={
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 256,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "query_pre_attn_scalar": 64,
        },
        # Gemma multiplies embeddings by sqrt(hidden_size), about 11, and normalises what every layer adds to 1.
        gains=Gains(embedding=0.04, mlp=2.5, norm=1.0),
        dtype="float32",
        prefix_caching=True,
        batches=True,
        cache="4 layers of sliding-window attention, 2 of full attention",
    ),
    TinyModel(
        name="deepseek-v2",
        architecture="DeepseekV2Config",
        config={
            "moe_intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "head_dim": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
        gains=Gains(),
        dtype="float32",
        prefix_caching=False,
        batches=False,
        cache="multi-head latent attention, one latent of 576 a token",
    ),
    TinyModel(
        name="granite-hybrid",
        architecture="GraniteMoeHybridConfig",
        config={
            "shared_intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
        },
        gains=Gains(embedding=0.2, value=1.5, output=4.0, mlp=2.0),
        dtype="float32",
        prefix_caching=False,
        batches=True,
        cache="3 layers of Mamba2 state, 1 of full attention",
    ),
)

MODELS = {model.name: model for model in _LIST}
"""Every model by name."""


def prompt(seed: int, length: int) -> list[int]:
    """A reproducible prompt: `length` token ids without special tokens."""
    source = random.Random(seed)  # noqa: S311 - reproducible on purpose
    return [source.randrange(len(SPECIAL_TOKENS), VOCABULARY) for _ in range(length)]


def write_model(name: str, folder: Path) -> Path:
    """Write a model and its tokenizer below `folder` unless they are there; return the model's own folder.

    The same name gives the same weights everywhere. Takes a few seconds, most of it to import torch.

    Raises:
        KeyError: no model has this name.
    """
    model = MODELS[name]
    path = folder / name
    mark = path / MARK
    contents = json.dumps({"model": name, "edition": EDITION})
    if mark.exists() and mark.read_text() == contents:
        return path
    # Nothing here is fetched; said before the import, since the library reads it once.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    config = getattr(transformers, model.architecture)(**(_SHARED | model.config))
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(network, model.gains)
    # Stored in half the size; each value is exact in float32 as well.
    network.to(torch.bfloat16)
    network.config.dtype = getattr(torch, model.dtype)
    network.save_pretrained(path)
    config_file = path / "config.json"
    written = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(written | {"dtype": model.dtype}, indent=2) + "\n")
    _write_tokenizer(path)
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
        case "v_proj" | "kv_b_proj" | "in_proj_qkv" | "in_proj_z" | "in_proj":
            return gains.value
        case "o_proj" | "out_proj":
            return gains.output
        case "in_proj_a":
            return gains.decay_input
        case "in_proj_b" | "lm_head":
            return 1.0
        case _:
            return gains.mlp


def _write_tokenizer(path: Path) -> None:
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
        model_max_length=_SHARED["max_position_embeddings"],
        **SPECIAL_TOKENS,
    ).save_pretrained(path)
