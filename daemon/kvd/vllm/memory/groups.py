"""vLLM's KV cache groups in our words.

Specs are told by the names of their classes, so nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.geometry.model import GroupKind
from kvd.topology.blocks import BlockList, offered
from kvd.vllm.errors import UnsupportedBuild

_KINDS: tuple[tuple[str, GroupKind], ...] = (
    ("MambaSpec", "mamba"),
    ("CircularBufferSpec", "mamba"),
    ("SlidingWindowSpec", "sliding_window"),
    ("ChunkedLocalAttentionSpec", "chunked"),
    ("MLAAttentionSpec", "mla"),
    ("FullAttentionSpec", "full"),
)
"""In the order in which they are asked for: a spec may derive from a later one.

A circular buffer is as a state: one block of a request, whatever its length, which nobody finds by its prefix.
"""

_HISPARSE = (
    "HiSparse keeps a model's KV in a pool of host memory with blocks of its own, which geometries here cannot say;"
    " stock NixlConnector moves that pool; leave hisparse_config of --attention-config out, or use NixlConnector"
)
_REFUSED: dict[str, str] = {
    "HiSparseHotSpec": _HISPARSE,
    "HiSparseResidentSpec": _HISPARSE,
    "CrossAttentionSpec": (
        "vLLM's scheduler takes no connector for models with an encoder, stock NixlConnector neither;"
        " leave --kv-transfer-config out"
    ),
    "EncoderOnlyAttentionSpec": (
        "it keeps no KV, so nothing could be handed over, by stock NixlConnector neither;"
        " leave --kv-transfer-config out"
    ),
}
"""Specs that are not moved: why, and what stock does with them. docs/connector.md lists them."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One group as both halves of the connector need it.

    ``block_size`` is in tokens of the engine as a whole.
    """

    kind: GroupKind
    block_size: int
    window: int | None = None
    scratch_blocks: int = 0


def is_spec(spec: Any, name: str) -> bool:
    """Whether a spec's class is, or derives from, the class of that name."""
    return any(cls.__name__ == name for cls in type(spec).__mro__)


def layer_spec(group: Any, layer: str) -> Any:
    """The spec of one layer: groups of like layers with unlike sizes keep one each."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return per_layer[layer] if per_layer is not None else group.kv_cache_spec


def group_facts(kv_cache_config: Any, dcp: int = 1) -> tuple[GroupFacts, ...]:
    """All groups of a KV cache config, in order.

    Raises `UnsupportedBuild` for a kind that cannot be transferred.
    """
    return tuple(_facts(index, group, dcp) for index, group in enumerate(kv_cache_config.kv_cache_groups))


def has_state(groups: Iterable[GroupFacts]) -> bool:
    """Whether any group keeps a recurrent state."""
    return any(g.kind == "mamba" for g in groups)


def keeps_prefix(groups: Sequence[GroupFacts]) -> bool:
    """Whether vLLM can be told which blocks of a load are bad, and keep those before them.

    Of several groups block ids are ambiguous. Of a windowed group the blocks before a shorter prefix were never there,
    and neither was the state at its end: vLLM would go on behind null blocks.
    """
    return len(groups) == 1 and groups[0].kind in ("full", "mla") and groups[0].window is None


def begins_behind_attention(groups: Sequence[GroupFacts]) -> bool:
    """Whether a load may begin behind what full attention has here, though other groups have less.

    A load brings the states at its end, and of attention, windows too, what is not cached (`cached_blocks`). For models
    with states and full attention, and for no others, vLLM looks up each group by itself.
    """
    return has_state(groups) and any(g.kind in {"full", "mla"} for g in groups)


def cached_blocks(blocks: Any) -> tuple[int, ...]:
    """Of each group of a request's `KVCacheBlocks`, how many at the front are of the prefix cache or null blocks.

    What a load is to fill has no hash before it has come.
    """
    return tuple(
        next((i for i, one in enumerate(group) if one.block_hash is None and not one.is_null), len(group))
        for group in blocks.blocks
    )


def offered_by_group(groups: Sequence[GroupFacts], table: Sequence[Sequence[int]]) -> dict[int, BlockList]:
    """What a request's block table offers to peers, by group index."""
    return {index: offered(g.kind, table[index], g.scratch_blocks) for index, g in enumerate(groups)}


def _facts(index: int, group: Any, dcp: int) -> GroupFacts:
    # With pipeline parallelism a group may have no layers on this stage; its spec still says what it is.
    spec = layer_spec(group, group.layer_names[0]) if group.layer_names else group.kv_cache_spec
    if refused := next((name for name in _REFUSED if is_spec(spec, name)), None):
        raise UnsupportedBuild(
            f"KV cache group {index} has a {refused}, which KvdConnector does not transfer: {_REFUSED[refused]}"
        )
    if dcp > 1 and is_spec(spec, "CircularBufferSpec") and getattr(spec, "dcp_sharded", True):
        raise UnsupportedBuild(
            f"KV cache group {index} has a circular buffer whose rows --decode-context-parallel-size {dcp} spreads"
            " over ranks, and which rank has which is not known; stock NixlConnector takes every rank's for whole;"
            " leave the option out"
        )
    kind = next((kind for name, kind in _KINDS if is_spec(spec, name)), None)
    if kind is None:
        known = ", ".join(name for name, _ in _KINDS)
        raise UnsupportedBuild(f"KV cache group {index} has a {type(spec).__name__}; known are {known}")
    window: int | None = None  # of other kinds all blocks are kept, even where the kernel looks at a window
    if kind == "sliding_window":
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    elif kind == "chunked":
        window = spec.attention_chunk_size
    sharded = dcp if kind != "mamba" and getattr(spec, "dcp_sharded", True) else 1
    return GroupFacts(
        kind=kind,
        block_size=spec.block_size * sharded,
        window=window,
        scratch_blocks=getattr(spec, "num_speculative_blocks", 0) if kind == "mamba" else 0,
    )
