"""The demo's tiny model, and what there is to say of such a model: its configuration, how its weights are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 512


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
        cache: what its KV cache consists of, in words.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    gains: Gains
    dtype: str
    cache: str


SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
}
"""Arguments that all configurations get."""

TINY = TinyModel(
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
    cache="3 layers of gated delta net state, 1 of full attention",
)
"""What the demo runs."""
