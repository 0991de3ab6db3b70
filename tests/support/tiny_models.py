"""The tiny models of end-to-end tests and benchmarks: one of each kind of KV cache, the demo's own among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvctl.demo import models
from kvctl.demo.kinds import TINY, Gains, TinyModel
from tests.support.processor import AMX

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
        cache="full attention with 4 KV heads",
    ),
    TINY,
    TinyModel(
        # The Gated DeltaNet of vLLM 0.26, which has no Qwen3.5 without pictures. It wants a layer with experts: both
        # are asked for every token, so that no answer hangs on a choice between them.
        name="qwen3-next",
        architecture="Qwen3NextConfig",
        config=TINY.config
        | {
            "mlp_only_layers": [0, 1, 2],
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        gains=Gains(embedding=0.4, value=1.5, norm=0.5, decay=3e-4, decay_input=0.3),
        dtype="bfloat16",
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
        # vLLM's kernels for prefill and decode on CPUs differ in rounding, which larger gains turn into other tokens.
        gains=Gains(query_key=0.5, value=2.0, output=1.0, mlp=1.0),
        dtype="float32",
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
        cache="3 layers of Mamba2 state, 1 of full attention",
    ),
    # The models from here on are there for the shape of their cache: their weights were not tuned as those above were.
    TinyModel(
        name="gpt-oss",
        architecture="GptOssConfig",
        config={
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        gains=Gains(),
        dtype="bfloat16",
        cache="2 layers of sliding-window attention, 2 of full attention, with sinks",
    ),
    TinyModel(
        name="nemotron-h",
        architecture="NemotronHConfig",
        config={
            "num_hidden_layers": 4,
            "layers_block_type": None,
            "hybrid_override_pattern": "M-*M",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 64,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 128,
        },
        gains=Gains(),
        dtype="float32",
        cache="2 layers of Mamba2 state, 1 of full attention, 1 with no cache at all",
    ),
    TinyModel(
        name="falcon-h1",
        architecture="FalconH1Config",
        config={
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
        },
        gains=Gains(),
        dtype="float32",
        cache="2 layers, each with full attention and Mamba2 state side by side",
    ),
    TinyModel(
        name="gemma2",
        architecture="Gemma2Config",
        config={
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 256,
            "tie_word_embeddings": True,  # the only way vLLM loads it
            "query_pre_attn_scalar": 64,
        },
        gains=Gains(embedding=0.04),
        dtype="float32",
        cache="2 layers of sliding-window attention, 2 of full attention, in turn",
    ),
    TinyModel(
        name="qwen3",
        architecture="Qwen3Config",
        config={
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        gains=Gains(norm=1.0),
        dtype="float32",
        cache="full attention with 2 KV heads and normalised keys",
    ),
)

MODELS = {model.name: model for model in _LIST}
"""Every model by name."""
NO_PREFIX_CACHING = frozenset({"deepseek-v2", "granite-hybrid", "nemotron-h", "falcon-h1"})
"""Those that vLLM cannot run with prefix caching on CPU."""
ARGUMENTS: dict[str, dict[str, Any]] = {"deepseek-v2": {"attention_backend": "CPU_MLA"}} if AMX else {}
"""vLLM's arguments that a model needs: on processors with AMX vLLM prefers a kernel for latents that takes bfloat16
alone, in which prefill and decode round differently."""
ONE_AT_A_TIME = frozenset({"qwen3.5-gdn", "qwen3-next", "deepseek-v2", "gpt-oss"})
"""Those to which vLLM on CPU may answer otherwise when it computes another prompt in the same step.

In bfloat16 sums of another batch round otherwise. There, compute one request at a time
(`EngineSpec.max_num_seqs=1`); loads of several overlap all the same.
"""


def write_model(name: str, folder: Path) -> Path:
    """Write the model of that name as `kvctl.demo.models.write_model` does. Raises `KeyError` where there is none."""
    return models.write_model(MODELS[name], folder)
