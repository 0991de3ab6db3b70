"""What a Hugging Face ``config.json`` says of a model's KV cache: its layers in order, each with its shape.

Keys and formulas are those of the model classes in vLLM 0.32 and transformers; layer names are vLLM's, since layers of
two engines are matched by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvd.geometry.errors import UnknownShape
from kvd.geometry.states import StateFamily


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A layer with keys and values: the model's KV heads, sizes of a head, and how far a token looks back."""

    kind: Literal["full", "sliding_window", "chunked"]
    heads: int
    key_size: int
    value_size: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LatentShape:
    """An MLA layer: elements of one token's latent, the rope part included."""

    size: int


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A state-space layer over all ranks.

    ``heads`` recurrent heads (channels for mamba1) of ``head_size`` values with a state of ``state_size``; ``groups``
    of B and C (mamba2) or heads of q and k (gdn); ``kernel`` is the convolution's width.
    """

    family: StateFamily
    heads: int
    head_size: int
    state_size: int
    groups: int
    kernel: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer that has a cache; ``depth`` is the decoder layer it belongs to, which decides its pipeline stage."""

    name: str
    depth: int
    shape: AttentionShape | LatentShape | RecurrentShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All that a model's configuration says of its caches; ``state_dtype`` is that of the recurrent state."""

    name: str
    dtype: str
    state_dtype: str
    max_tokens: int
    depth: int
    layers: tuple[LayerShape, ...]

    @property
    def hybrid(self) -> bool:
        """Whether attention and state-space layers stand side by side."""
        states = [isinstance(layer.shape, RecurrentShape) for layer in self.layers]
        return any(states) and not all(states)


def model_shape(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The model of a ``config.json``. Raises `UnknownShape` where a figure is missing or the family is not known."""
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else dict(config)
    text = {**DEFAULTS.get(str(text.get("model_type")), {}), **text}
    prefix = "language_model.model" if "text_config" in config else "model"
    family = str(text.get("model_type", ""))
    if "index_head_dim" in text:
        raise UnknownShape(
            f"{family} keeps an index cache beside its latents, which this version does not know"
        )
    make = FAMILIES.get(family, _plain)
    layers = tuple(make(text, prefix))
    if not layers:
        raise UnknownShape(f"{family or 'the model'} has no layer with a cache")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return ModelShape(
        name=name or str(config.get("_name_or_path") or family),
        dtype=dtype,
        state_dtype=str(_state_dtype(family, text) or dtype),
        max_tokens=int(text.get("max_position_embeddings", 8192)),
        # Some configurations give the depth only as the list of what each layer is.
        depth=len(text.get("layers_block_type") or ()) or _int(text, "num_hidden_layers"),
        layers=layers,
    )


def _state_dtype(family: str, text: Mapping[str, Any]) -> str | None:
    """Type of the recurrent state: Nemotron-H defaults to float32, Qwen3.5 says it, all others keep the model's."""
    if family == "nemotron_h":
        return str(text.get("mamba_ssm_cache_dtype", "float32"))
    if family.startswith("qwen3_5"):
        return text.get("mamba_ssm_dtype")
    return None


def _plain(text: Mapping[str, Any], prefix: str) -> Iterator[LayerShape]:
    """Llama, Qwen, Mistral, Gemma, gpt-oss and their like: every layer has keys and values."""
    if unlike := next((key for key in UNLIKE_LAYERS if text.get(key)), None):
        raise UnknownShape(
            f"{text.get('model_type')} says {unlike}: its layers have unlike heads or share caches, which is not read"
            " from a configuration; export the geometry of an engine that serves it"
        )
    last = ".attn.attn" if text.get("model_type") == "gpt_oss" else ".self_attn.attn"
    for depth in range(_int(text, "num_hidden_layers")):
        yield LayerShape(f"{prefix}.layers.{depth}{last}", depth, _attention(text, depth))


def _attention(text: Mapping[str, Any], depth: int) -> AttentionShape:
    heads, size = _heads(text)
    kind = _layer_type(text, depth)
    window = text.get("sliding_window")
    if kind == "sliding_attention" and window:
        return AttentionShape("sliding_window", heads, size, size, int(window))
    if kind == "chunked_attention" and text.get("attention_chunk_size"):
        return AttentionShape("chunked", heads, size, size, _int(text, "attention_chunk_size"))
    return AttentionShape("full", heads, size, size)


UNLIKE_LAYERS = (
    "global_head_dim",
    "num_global_key_value_heads",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "num_kv_shared_layers",
    "block_configs",
    "attention_other_setting",
)
"""Keys by which Gemma 3n and 4, MiMo, Nemotron NAS and Step tell that layers differ in more than their window."""


def _heads(text: Mapping[str, Any]) -> tuple[int, int]:
    queries = _int(text, "num_attention_heads")
    heads = _int(text, "num_key_value_heads") if text.get("num_key_value_heads") else queries
    return heads, _int(text, "head_dim") if text.get("head_dim") else _int(text, "hidden_size") // queries


def _layer_type(text: Mapping[str, Any], depth: int) -> str:
    """The layer's entry in ``layer_types``, or what older configurations mean without one."""
    types = text.get("layer_types")
    if types:
        return str(types[depth])
    if pattern := text.get("sliding_window_pattern"):
        return "full_attention" if (depth + 1) % int(pattern) == 0 else "sliding_attention"
    if text.get("model_type") == "gpt_oss":
        return "full_attention" if depth % 2 else "sliding_attention"
    windowed = text.get("sliding_window") and text.get(
        "use_sliding_window", text.get("model_type") == "mistral"
    )
    # Qwen: the first layers have full attention even so.
    first = int(text.get("max_window_layers") or 0)
    return "sliding_attention" if windowed and depth >= first else "full_attention"


def _mla(text: Mapping[str, Any], prefix: str) -> Iterator[LayerShape]:
    """DeepSeek V2 and V3, Kimi K2: ``kv_lora_rank`` and the rope part, one latent for all heads."""
    size = _int(text, "kv_lora_rank") + _int(text, "qk_rope_head_dim")
    for depth in range(_int(text, "num_hidden_layers")):
        yield LayerShape(f"{prefix}.layers.{depth}.self_attn.attn", depth, LatentShape(size))


def _gdn(text: Mapping[str, Any], prefix: str) -> Iterator[LayerShape]:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet, with full attention every ``full_attention_interval`` layers."""
    heads, size = _heads(text)
    state = RecurrentShape(
        family="gdn",
        heads=_int(text, "linear_num_value_heads"),
        head_size=_int(text, "linear_value_head_dim"),
        state_size=_int(text, "linear_key_head_dim"),
        groups=_int(text, "linear_num_key_heads"),
        kernel=_int(text, "linear_conv_kernel_dim"),
    )
    every = int(text.get("full_attention_interval") or 4)
    for depth in range(_int(text, "num_hidden_layers")):
        types = text.get("layer_types")
        full = types[depth] == "full_attention" if types else (depth + 1) % every == 0
        if full:
            shape = AttentionShape("full", heads, size, size)
            yield LayerShape(f"{prefix}.layers.{depth}.self_attn.attn", depth, shape)
        else:
            yield LayerShape(f"{prefix}.layers.{depth}.linear_attn", depth, state)


def _nemotron_h(text: Mapping[str, Any], prefix: str) -> Iterator[LayerShape]:
    """Nemotron-H: ``hybrid_override_pattern`` has M for Mamba2, * for attention, - and E for layers without a cache."""
    heads, size = _heads({**text, "head_dim": text.get("head_dim") or text.get("attention_head_dim")})
    state = RecurrentShape(
        family="mamba2",
        heads=_int(text, "mamba_num_heads"),
        head_size=_int(text, "mamba_head_dim"),
        state_size=_int(text, "ssm_state_size"),
        groups=_int(text, "n_groups"),
        kernel=_int(text, "conv_kernel"),
    )
    pattern = text.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        # The second names are those that transformers 5 writes.
        names = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}
        pattern = "".join(names.get(str(kind), "-") for kind in text.get("layers_block_type", ()))
    for depth, letter in enumerate(pattern):
        if letter == "M":
            yield LayerShape(f"{prefix}.layers.{depth}.mixer", depth, state)
        elif letter == "*":
            shape = AttentionShape("full", heads, size, size)
            yield LayerShape(f"{prefix}.layers.{depth}.mixer.attn", depth, shape)


def _mamba2(text: Mapping[str, Any], *, inner: int) -> RecurrentShape:
    """Granite's and Falcon's Mamba2, with ``inner`` channels in all."""
    heads = _int(text, "mamba_n_heads")
    return RecurrentShape(
        family="mamba2",
        heads=heads,
        head_size=inner // heads,
        state_size=_int(text, "mamba_d_state"),
        groups=_int(text, "mamba_n_groups"),
        kernel=_int(text, "mamba_d_conv"),
    )


def _granite(text: Mapping[str, Any], prefix: str) -> Iterator[LayerShape]:
    """Granite 4: ``layer_types`` of mamba and attention."""
    heads, size = _heads(text)
    state = _mamba2(text, inner=_int(text, "mamba_expand") * _int(text, "hidden_size"))
    for depth, kind in enumerate(text.get("layer_types") or text.get("layers_block_type") or ()):
        # The names changed: IBM's configurations say mamba and attention, transformers 5 writes the others.
        if kind in ("mamba", "linear_attention"):
            yield LayerShape(f"{prefix}.layers.{depth}.mixer", depth, state)
        elif kind in ("attention", "full_attention"):
            shape = AttentionShape("full", heads, size, size)
            yield LayerShape(f"{prefix}.layers.{depth}.self_attn.attn", depth, shape)
        else:
            raise UnknownShape(f"layer {depth} is of type {kind!r}; known are mamba and attention")


def _falcon_h1(text: Mapping[str, Any], prefix: str) -> Iterator[LayerShape]:
    """Falcon-H1: every layer has both; vLLM numbers the Mamba halves after the last layer, outside ``layers``."""
    heads, size = _heads(text)
    inner = text.get("mamba_d_ssm") or _int(text, "mamba_expand") * _int(text, "hidden_size")
    state = _mamba2(text, inner=int(inner))
    count = _int(text, "num_hidden_layers")
    for depth in range(count):
        yield LayerShape(f"{prefix}.layers.{depth}.attn", depth, AttentionShape("full", heads, size, size))
        yield LayerShape(f"{prefix}.{count + depth}.mixer", depth, state)


_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}

DEFAULTS: dict[str, dict[str, int]] = {
    "gemma2": {**_GEMMA, "sliding_window_pattern": 2},
    "gemma3": {**_GEMMA, "sliding_window_pattern": 6, "max_position_embeddings": 131072},
    "gemma3_text": {**_GEMMA, "sliding_window_pattern": 6, "max_position_embeddings": 131072},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
}
"""What published files leave out because transformers' configuration class has it, by ``model_type``."""

FAMILIES: dict[str, Callable[[Mapping[str, Any], str], Iterator[LayerShape]]] = {
    "deepseek_v2": _mla,
    "deepseek_v3": _mla,
    "kimi_k2": _mla,
    "qwen3_next": _gdn,
    "qwen3_5": _gdn,
    "qwen3_5_text": _gdn,
    "qwen3_5_moe": _gdn,
    "qwen3_5_moe_text": _gdn,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon_h1,
}
"""By ``model_type``; every other model is taken for one whose layers all have keys and values."""


def _int(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnknownShape(f"the configuration says {value!r} of {key}, which must be a positive number")
    return value
