"""What of a model's configuration decides its KV, in one form however it was written.

Hugging Face's ``config.json`` also holds what another version of a library wrote differently and what concerns
tokenizers, training and generation. None of it changes a key or a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from kvd.weights.errors import WeightsUnreadable

NOISE = frozenset(
    {
        # Who wrote it, from what, in which precision it is run: precision is a fact of its own, the checkpoint's is
        # that of its tensors.
        "transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "auto_map", "model_name",
        "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
        # Tokenizers, labels and what is sampled. The tokens themselves are compared request by request.
        "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
        "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task",
        "do_sample", "temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_length", "min_length", "max_new_tokens",
        "num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences",
        "remove_invalid_values", "exponential_decay_length_penalty",
        # How the model is run.
        "use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "output_scores",
        "return_dict", "return_dict_in_generate", "torchscript", "use_bfloat16", "chunk_size_feed_forward",
        "pretraining_tp", "use_mamba_kernels", "use_flash_attn", "use_kernels",
        # Training.
        "initializer_range", "initializer_factor", "gradient_checkpointing", "router_aux_loss_coef",
        "router_z_loss_coef", "router_jitter_noise", "output_router_logits", "aux_loss_alpha", "seq_aux",
    }
)  # fmt: skip
"""Keys without a bearing on KV, at any depth; whatever ends in one of `_TRAINED` has none either."""
_ROTARY = ("rope_theta", "rope_scaling", "rope_parameters")
_TRAINED = ("dropout", "dropout_prob", "dropout_rate")


def digest_configuration(*parts: object, noise: frozenset[str] = NOISE) -> bytes:
    """A digest of configurations in their `canonical` form.

    Raises `WeightsUnreadable` for one that is nested too deeply.
    """
    try:
        told = _encode([canonical(part, noise) for part in parts])
    except RecursionError:
        raise WeightsUnreadable("the configuration is nested too deeply") from None
    return hashlib.blake2b(b"configuration" + told, digest_size=32).digest()


def canonical(value: object, noise: frozenset[str] = NOISE) -> Any:
    """``value`` without `NOISE` and nulls, numbers and rotary embeddings in one spelling, keys in order."""
    if isinstance(value, Mapping):
        kept = {
            str(key): inner
            for key, inner in value.items()
            if inner is not None and key not in noise and not str(key).endswith(_TRAINED)
        }
        return {key: canonical(inner, noise) for key, inner in sorted(_rotary(kept).items())}
    if isinstance(value, list | tuple):
        return [canonical(inner, noise) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((canonical(inner, noise) for inner in value), key=_encode)
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return value if isinstance(value, bool | int | str) or value is None else str(value)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the entries of ``over`` in place of its own, objects within objects likewise."""
    made = dict(base)
    for key, value in over.items():
        mine = made.get(key)
        made[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return made


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and the like as one list: libraries of before 5.0 write them apart."""
    told = {name: config[name] for name in (*_ROTARY, "partial_rotary_factor") if name in config}
    parts = [told.pop(name, {}) for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, Mapping) for part in parts) or config.keys().isdisjoint(_ROTARY):
        return config
    rope = {**told, **parts[0], **parts[1]}
    if any(isinstance(inner, Mapping) for inner in rope.values()):
        return config  # by kind of layer, which older spellings do not know
    older = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or older
    if kind != "default":
        rope["rope_type"] = kind
    rotary = sorted((name, value) for name, value in rope.items() if value is not None)
    kept = {name: value for name, value in config.items() if name not in told and name not in _ROTARY}
    # Under another name and as a list: what it holds is not to be gathered once more.
    return kept | ({"rotary": rotary} if rotary else {})


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")
