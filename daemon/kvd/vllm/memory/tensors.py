"""From the live tensors that vLLM hands to register_kv_caches to this worker's geometry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from typing import Any

from kvd.geometry.check import check_worker
from kvd.geometry.errors import UnknownShape
from kvd.geometry.live import (
    BlockAxes,
    Dim,
    LiveTensor,
    Packing,
    attention_layer,
    cpu_attention_layer,
    latent_layer,
    packed_layer,
    whole_block_layer,
)
from kvd.geometry.model import Group, Layer, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.geometry.shards import ContextShare, share
from kvd.geometry.states import StateFamily, StateShape, ring_layer, state_layer, whole_state_layer
from kvd.vllm.memory.groups import GroupFacts, is_spec, layer_spec

_FAMILIES: dict[tuple[str, int], StateFamily] = {
    ("GDN_ATTN", 2): "gdn",
    ("MAMBA2", 2): "mamba2",
    ("MAMBA1", 2): "mamba1",
    ("SHORT_CONV", 1): "short_conv",
    ("LINEAR", 1): "linear",
}
"""By vLLM's type of the layer and how many states it keeps. With others beside them, as records of steps that may be
taken back, a page moves whole."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands, and what of the model its tensors cannot tell.

    ``kv_heads`` is the model's number of KV heads. ``layer_heads`` is, by name, that of layers which have another
    number or belong to another model (a drafter). ``state_groups`` are the model's B/C groups (None where it has none).
    ``interleave`` is the run of consecutive tokens on one context-parallel rank. ``channels_first`` is vLLM's layout of
    convolution states. ``packing`` tells how vLLM's CPU attention packs blocks, given a spec and the tokens of a kernel
    block; None where tensors hold what their shapes say.
    """

    rank: Rank
    tp: int
    dcp: int
    kv_heads: int
    state_groups: int | None = None
    interleave: int = 1
    channels_first: bool = False
    packing: Callable[[Any, int], Packing] | None = None
    layer_heads: Mapping[str, int] = field(default_factory=dict)


def worker_geometry(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, groups: tuple[GroupFacts, ...], place: Place
) -> WorkerGeometry:
    """The geometry of one worker. Raises `GeometryError` subclasses that name the layer and both values."""
    regions = storages(kv_caches)
    count, made = kv_cache_config.num_blocks, []
    for index, (facts, group) in enumerate(zip(groups, kv_cache_config.kv_cache_groups, strict=True)):
        layers = tuple(
            _layer(live_tensor(name, kv_caches[name]), layer_spec(group, name), facts, regions, count, place)
            for name in group.layer_names
            if name in kv_caches
        )
        made.append(
            Group(
                index=index,
                kind=facts.kind,
                block_size=facts.block_size,
                layers=layers,
                window=facts.window,
                scratch_blocks=facts.scratch_blocks,
            )
        )
    geometry = WorkerGeometry(rank=place.rank, num_blocks=count, regions=regions, groups=tuple(made))
    check_worker(geometry)
    return geometry


def sibling_geometries(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, groups: tuple[GroupFacts, ...], place: Place
) -> tuple[WorkerGeometry, ...]:
    """The geometries of all tensor-parallel workers of this pipeline stage, in rank order, this one's too.

    They differ in which heads and channels they hold, not in shape, so each worker knows them all without
    asking.
    """
    return tuple(
        worker_geometry(
            kv_caches,
            kv_cache_config,
            groups,
            replace(place, rank=Rank(tp=tp, pp=place.rank.pp, dcp=tp % place.dcp)),
        )
        for tp in range(place.tp)
    )


def storages(kv_caches: Mapping[str, Any]) -> tuple[Region, ...]:
    """The distinct backing allocations of the tensors: groups overlay each other, so there are few."""
    found: dict[int, Region] = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        device = "cpu" if tensor.device.type == "cpu" else f"{tensor.device.type}:{tensor.device.index or 0}"
        found.setdefault(storage.data_ptr(), Region(storage.data_ptr(), storage.nbytes(), device))
    return tuple(found.values())


def live_tensor(layer: str, tensor: Any) -> LiveTensor:
    """A torch tensor stripped to what geometry needs; strides in bytes."""
    size = tensor.element_size()
    return LiveTensor(
        layer=layer,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(s * size for s in tensor.stride()),
        dtype=dtype_name(tensor.dtype),
        itemsize=size,
    )


def dtype_name(dtype: Any) -> str:
    """``bfloat16`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _layer(
    tensor: LiveTensor,
    spec: Any,
    facts: GroupFacts,
    regions: tuple[Region, ...],
    num_blocks: int,
    place: Place,
) -> Layer:
    if is_spec(spec, "CircularBufferSpec"):
        return ring_layer(tensor, regions, count=num_blocks)
    if facts.kind == "mamba":
        return _state_layer(tensor, spec, regions, place)
    if len(tensor.shape) != 4:
        raise UnknownShape(
            f"{tensor.layer}: a cache tensor of shape {tensor.shape}; known is (blocks, heads, tokens, content)"
        )
    context = (
        ContextShare(place.rank.dcp, place.dcp, place.interleave)
        if facts.block_size != spec.block_size
        else ContextShare()
    )
    blocks = BlockAxes(count=num_blocks, tokens=facts.block_size, context=context)
    latent = is_spec(spec, "MLAAttentionSpec") or is_spec(spec, "SlidingWindowMLASpec")
    # With context parallelism, ranks of one context group hold the same heads of different tokens.
    ranks = place.tp // place.dcp
    total = _total_heads(tensor.layer, spec, place)
    heads = None if latent else share("KV heads", total, place.rank.tp // place.dcp, ranks)
    covers = Fraction(getattr(spec, "tokens_per_state", 1))
    slots = getattr(spec, "num_head_slots", None)
    if covers != 1 or slots is not None or (latent and _by_block(tensor, spec)):
        packing = _packing(spec)
        if tensor.itemsize != 1 and (covers != 1 or slots is not None):
            packing = f"{packing}, {tensor.dtype}"
        return whole_block_layer(tensor, regions, blocks=blocks, packing=packing, covers=covers, heads=heads)
    if (cell := getattr(spec, "state_content_bytes", None)) is not None:
        return packed_layer(tensor, regions, blocks=blocks, heads=heads, cell=cell, packing=_packing(spec))
    if heads is None:
        return latent_layer(
            tensor, regions, dims=("block", "head", "token", "dim"), blocks=blocks, size=spec.head_size
        )
    key, value = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
    if place.packing is not None:
        arranged = place.packing(spec, tensor.shape[2])
        return cpu_attention_layer(
            tensor, regions, blocks=blocks, heads=heads, key_size=key, value_size=value, packing=arranged
        )
    dims: tuple[Dim, ...] = ("block", "head", "token", "key+value")
    return attention_layer(
        tensor, regions, dims=dims, blocks=blocks, heads=heads, key_size=key, value_size=value
    )


def _packing(spec: Any) -> str:
    """What vLLM calls the format of quantised pages; numbers of its enumeration may change from version to version."""
    mode = getattr(spec, "kv_quant_mode", "none")
    name = str(getattr(mode, "name", mode)).lower()
    given = getattr(spec, "cache_dtype_str", None)
    return f"packed {name}" if given in (None, name) else f"packed {name} {given}"


def _by_block(tensor: LiveTensor, spec: Any) -> bool:
    """Whether a block holds the values of all its tokens and then their scales, as the caches of sparse attention do.

    DeepSeek V3.2's index is bytes of no declared format; V4 names itself in ``model_version``. The cells of 656 and 352
    bytes of ``fp8_ds_mla`` and ``nvfp4_ds_mla`` have their scales inside.
    """
    if getattr(spec, "model_version", None) is not None:
        return True
    if tensor.itemsize != 1:
        return False
    role = getattr(getattr(spec, "cache_role", None), "value", None)
    undeclared = getattr(spec, "state_content_bytes", None) is None and _packing(spec) == "packed none"
    return role == "indexer" or undeclared


def _total_heads(layer: str, spec: Any, place: Place) -> int:
    """The heads that all ranks together hold of this layer.

    With more ranks than heads a rank's one says nothing, so what the layer's model says counts where it fits.
    """
    ranks, told = place.tp // place.dcp, place.layer_heads.get(layer, place.kv_heads)
    return told if spec.num_kv_heads == max(1, told // ranks) else int(spec.num_kv_heads * ranks)


def _state_layer(tensor: LiveTensor, spec: Any, regions: tuple[Region, ...], place: Place) -> Layer:
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    family = _FAMILIES.get((kind, len(spec.shapes)))
    ranks, rank = (1, 0) if getattr(spec, "tp_replicated", False) else (place.tp, place.rank.tp)
    shapes = [
        (tuple(shape), dtype_name(dtype), dtype.itemsize)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    if family is None:
        size = sum(prod(shape) * itemsize for shape, _, itemsize in shapes)
        what = " ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in shapes)
        return whole_state_layer(
            tensor, regions, size=size, packing=f"packed {kind} {what}", rank=rank, ranks=ranks
        )
    conv = None if family == "linear" else shapes[0]
    ssm = None if family == "short_conv" else shapes[-1]
    return state_layer(
        tensor,
        regions,
        state=StateShape(
            family=family,
            conv=conv,
            ssm=ssm,
            heads=(ssm[0][0] if ssm is not None else 1) * ranks,
            groups=place.state_groups or ranks,
            channels_first=place.channels_first,
        ),
        rank=rank,
        ranks=ranks,
        block_stride=tensor.strides[0],
    )
