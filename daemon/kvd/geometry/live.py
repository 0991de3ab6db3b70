"""Geometry from live tensors: their own shape and stride say where the bytes stand, never a layout flag.

The caller (`kvd.vllm`) strips its tensors down to `LiveTensor`, so nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from kvd.geometry.errors import UnknownShape
from kvd.geometry.model import Axis, Field, Layer, Page, Region
from kvd.geometry.shards import (
    WHOLE_CONTEXT,
    ContextShare,
    ConvSection,
    Placement,
    Share,
    conv_fields,
    kv_fields,
    latent_field,
    share,
    state_field,
    token_axes,
)

Dim = Literal["kv", "block", "head", "token", "dim", "key+value"]
"""What one dimension of a cache tensor is.

``kv`` picks K or V, ``key+value`` holds both one after the other.
"""

StateFamily = Literal["mamba1", "mamba2", "gdn"]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One layer's cache tensor. ``strides`` are in bytes, ``address`` is that of the first element."""

    layer: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many blocks the worker has and how many tokens a block covers on the engine as a whole."""

    count: int
    tokens: int
    context: ContextShare = WHOLE_CONTEXT


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a state layer keeps: this rank's convolution and recurrent shapes as vLLM's spec gives them.

    ``heads`` is the model's number of recurrent heads (channels for mamba1), ``groups`` its number of B/C
    groups (mamba2), ``conv`` and ``ssm`` are (shape, dtype, item size).
    """

    family: StateFamily
    conv: tuple[tuple[int, ...], str, int]
    ssm: tuple[tuple[int, ...], str, int]
    heads: int
    groups: int = 1
    channels_first: bool = False


def find_region(regions: Sequence[Region], address: int, what: str) -> int:
    """Index of the region that holds ``address``. Raises `UnknownShape` where none does."""
    for i, region in enumerate(regions):
        if region.address <= address < region.address + region.length:
            return i
    raise UnknownShape(f"{what} stands at {address:#x}, outside all {len(regions)} registered regions")


def attention_layer(
    tensor: LiveTensor,
    regions: Sequence[Region],
    *,
    dims: Sequence[Dim],
    blocks: Blocks,
    heads: Share,
    key_size: int,
    value_size: int,
) -> Layer:
    """The layer of a tensor with heads.

    ``dims`` names the tensor's dimensions. A tensor with more blocks than the worker has holds kernel blocks:
    a block is ``shape[block] / blocks.count`` of them. Raises `UnknownShape` where shape and facts disagree.
    """
    at = _dims(tensor, dims)
    kernel_blocks, tokens = _tokens(tensor, at, blocks)
    _expect_heads(tensor, tensor.shape[at["head"]], heads)
    if "key+value" in at:
        inner = at["key+value"]
        _expect(tensor, "key and value size", tensor.shape[inner], key_size + value_size)
        value_offset = key_size * tensor.strides[inner]
    else:
        inner = at["dim"]
        _expect(tensor, "head size", tensor.shape[inner], key_size)
        value_offset = tensor.strides[at["kv"]]
    fields = kv_fields(
        dtype=tensor.dtype,
        itemsize=tensor.itemsize,
        heads=heads,
        tokens=tokens,
        block_tokens=blocks.tokens,
        key_size=key_size,
        value_size=value_size,
        place=Placement(
            head_stride=tensor.strides[at["head"]],
            dim_stride=tensor.strides[inner],
            key_offset=0,
            value_offset=value_offset,
        ),
    )
    return _layer(tensor, regions, fields, kernel_blocks * tensor.strides[at["block"]])


Packing = Literal["vec", "opaque"]
"""How vLLM's CPU attention arranges a head's block behind the shape that its tensor shows."""


def cpu_attention_layer(
    tensor: LiveTensor,
    regions: Sequence[Region],
    *,
    blocks: Blocks,
    heads: Share,
    key_size: int,
    value_size: int,
    packing: Packing,
) -> Layer:
    """The layer of a ``CPU_ATTN`` tensor ``(block, head, token, key + value)``, whose shape is not its content.

    For each head of a kernel block stand all keys and then all values (vllm/v1/attention/backends/cpu_attn.py
    views it as ``(block, head, 2 * token, size)``). With ``vec`` kernels keys are transposed, ``(size,
    token)``, and values are ``(token, size)``. Others (``amx``) pack in a way that is not known here:
    ``opaque`` blocks move whole, so they fit only blocks of the same size. Raises `UnknownShape` where shape
    and facts disagree.
    """
    at = _dims(tensor, ("block", "head", "token", "key+value"))
    kernel_blocks, _ = _tokens(tensor, at, blocks)
    _expect_heads(tensor, tensor.shape[at["head"]], heads)
    _expect(tensor, "key and value size", tensor.shape[at["key+value"]], key_size + value_size)
    item, kernel_tokens = tensor.itemsize, tensor.shape[at["token"]]
    fields = []
    inner: tuple[Axis, ...]
    shape: tuple[tuple[str, int], ...]
    for name, size, offset in (("k", key_size, 0), ("v", value_size, kernel_tokens * key_size * item)):
        if packing == "opaque":
            whole = kernel_blocks * kernel_tokens * size
            inner = (
                Axis("packed", 0, kernel_blocks, kernel_tokens * size, tensor.strides[at["block"]]),
                Axis("packed", 0, kernel_tokens * size, 1, item),
            )
            shape = (("head", heads.total), ("packed", whole))
        else:
            token, dim = (item, kernel_tokens * item) if name == "k" else (size * item, item)
            tokens = token_axes(
                kernel_blocks=kernel_blocks,
                kernel_tokens=kernel_tokens,
                kernel_stride=tensor.strides[at["block"]],
                token_stride=token,
                context=blocks.context,
            )
            inner = (*tokens, Axis("dim", 0, size, 1, dim))
            shape = (("head", heads.total), ("token", blocks.tokens), ("dim", size))
        head = Axis("head", heads.start, heads.extent, 1, tensor.strides[at["head"]])
        fields.append(Field(name, tensor.dtype, item, offset, (head, *inner), shape))
    return _layer(tensor, regions, tuple(fields), kernel_blocks * tensor.strides[at["block"]])


def latent_layer(
    tensor: LiveTensor, regions: Sequence[Region], *, dims: Sequence[Dim], blocks: Blocks, size: int
) -> Layer:
    """The layer of an MLA tensor: one latent a token, the same on every tensor-parallel rank."""
    at = _dims(tensor, dims)
    kernel_blocks, tokens = _tokens(tensor, at, blocks)
    _expect(tensor, "latent size", tensor.shape[at["dim"]], size)
    fld = latent_field(
        dtype=tensor.dtype,
        itemsize=tensor.itemsize,
        tokens=tokens,
        block_tokens=blocks.tokens,
        size=size,
        dim_stride=tensor.strides[at["dim"]],
    )
    return _layer(tensor, regions, (fld,), kernel_blocks * tensor.strides[at["block"]])


def packed_layer(
    tensor: LiveTensor,
    regions: Sequence[Region],
    *,
    blocks: Blocks,
    heads: Share | None,
    cell: int,
    packing: str,
) -> Layer:
    """The layer of a quantised tensor ``(block, head, token, cell)``.

    Values and their scales packed into one cell.

    What stands inside a cell of ``cell`` bytes is not looked at: it moves whole, so heads and tokens can be
    resharded and ``packing``, vLLM's name of the format, must be the same on both sides. ``heads`` is None
    where all ranks hold the same cells (MLA). Raises `UnknownShape` where shape and facts disagree.
    """
    at = _dims(tensor, ("block", "head", "token", "dim"))
    kernel_blocks, tokens = _tokens(tensor, at, blocks)
    _expect(tensor, "bytes a cell", tensor.shape[at["dim"]] * tensor.itemsize, cell)
    _expect(tensor, "bytes between the elements of a cell", tensor.strides[at["dim"]], tensor.itemsize)
    _expect(tensor, "heads", tensor.shape[at["head"]], heads.extent if heads else 1)
    axes = (*tokens, Axis("byte", 0, cell, 1, 1))
    shape: tuple[tuple[str, int], ...] = (("token", blocks.tokens), ("byte", cell))
    if heads is not None:
        axes = (Axis("head", heads.start, heads.extent, 1, tensor.strides[at["head"]]), *axes)
        shape = (("head", heads.total), *shape)
    fld = Field(name="cell", dtype=packing, itemsize=1, offset=0, axes=axes, shape=shape)
    return _layer(tensor, regions, (fld,), kernel_blocks * tensor.strides[at["block"]])


def whole_block_layer(
    tensor: LiveTensor, regions: Sequence[Region], *, blocks: Blocks, packing: str
) -> Layer:
    """The layer of a tensor ``(block, 1, token, cell)`` whose shape is not its content: kernel blocks move whole.

    The caches of sparse attention hold the values of all tokens of a kernel block first and then all scales, so a
    token's bytes stand in two places. ``packing`` says what is in there; that and the tokens of a kernel block, of
    which a block may be several, must be the same on both sides, and so must context parallelism. Raises
    `UnknownShape` where shape and facts disagree or a kernel block is not one piece.
    """
    at = _dims(tensor, ("block", "head", "token", "dim"))
    kernel_blocks, _ = _tokens(tensor, at, blocks)
    kernel_tokens, context = tensor.shape[at["token"]], blocks.context
    cell = tensor.shape[at["dim"]] * tensor.itemsize
    _expect(tensor, "heads", tensor.shape[at["head"]], 1)
    _expect(tensor, "bytes between the elements of a cell", tensor.strides[at["dim"]], tensor.itemsize)
    _expect(tensor, "bytes between tokens", tensor.strides[at["token"]], cell)
    step, size = kernel_tokens * context.size, kernel_tokens * cell
    axes: tuple[Axis, ...] = (
        Axis("token", 0, kernel_blocks, step, tensor.strides[at["block"]]),
        Axis("byte", 0, size, 1, 1),
    )
    shape: tuple[tuple[str, int], ...] = (("token", blocks.tokens), ("byte", size))
    if context.size > 1:
        axes = (Axis("context", context.rank, 1, 1, 0), *axes)
        shape = (("context", context.size), *shape)
        packing = f"{packing}, {context.interleave} tokens in a row"
    fld = Field("block", f"{packing}, blocks of {kernel_tokens} tokens", 1, 0, axes, shape)
    return _layer(tensor, regions, (fld,), kernel_blocks * tensor.strides[at["block"]])


def state_layer(
    tensor: LiveTensor,
    regions: Sequence[Region],
    *,
    state: StateShape,
    rank: int,
    ranks: int,
    block_stride: int,
) -> Layer:
    """The layer of a state-space layer.

    A page is the convolution state and then the recurrent state, both dense.
    """
    return _layer(tensor, regions, state_fields(state, rank, ranks), block_stride)


def state_fields(state: StateShape, rank: int, ranks: int) -> tuple[Field, ...]:
    """Fields of one state page on ``rank`` of ``ranks``.

    Section widths follow from the shapes alone: the recurrent state tells the value part, the rest is shared
    evenly by the other two sections (``B``/``C`` of Mamba2, ``q``/``k`` of Gated DeltaNet).
    """
    conv_shape, conv_dtype, conv_size = state.conv
    ssm_shape, ssm_dtype, ssm_size = state.ssm
    channels, taps = conv_shape if state.channels_first or state.family == "mamba1" else conv_shape[::-1]
    heads = share(f"{state.family} heads", state.heads, rank, ranks)
    if ssm_shape[0] != heads.extent:
        raise UnknownShape(
            f"a {state.family} state of {ssm_shape[0]} heads on one of {ranks} ranks, of {state.heads} in all"
        )
    sections = _sections(state, channels, ssm_shape, rank, ranks)
    conv = conv_fields(
        dtype=conv_dtype,
        itemsize=conv_size,
        sections=sections,
        taps=taps,
        channels_first=state.channels_first or state.family == "mamba1",
    )
    ssm = state_field(
        dtype=ssm_dtype,
        itemsize=ssm_size,
        offset=prod(conv_shape) * conv_size,
        heads=heads,
        inner=ssm_shape[1:],
    )
    return (*conv, ssm)


def _sections(
    state: StateShape, channels: int, ssm_shape: tuple[int, ...], rank: int, ranks: int
) -> tuple[ConvSection, ...]:
    if state.family == "mamba1":
        return (ConvSection("x", Share(rank * channels, channels, channels * ranks)),)
    value = ssm_shape[0] * ssm_shape[1]
    rest, odd = divmod(channels - value, 2)
    if rest < 1 or odd:
        raise UnknownShape(
            f"a {state.family} convolution of {channels} channels, {value} of them values,"
            f" leaves {channels - value} for two sections"
        )
    whole = Share(rank * value, value, value * ranks)
    if state.family == "gdn":
        part = Share(rank * rest, rest, rest * ranks)
        return (ConvSection("q", part), ConvSection("k", part), ConvSection("v", whole))
    group = share("B/C groups", state.groups, rank, ranks)
    width = rest // group.extent
    part = Share(group.start * width, rest, state.groups * width)
    return (ConvSection("x", whole), ConvSection("B", part), ConvSection("C", part))


def _dims(tensor: LiveTensor, dims: Sequence[Dim]) -> dict[str, int]:
    if len(dims) != len(tensor.shape):
        raise UnknownShape(
            f"{tensor.layer}: a tensor of {len(tensor.shape)} dimensions {tensor.shape}, expected {tuple(dims)}"
        )
    return {name: i for i, name in enumerate(dims)}


def _tokens(tensor: LiveTensor, at: dict[str, int], blocks: Blocks) -> tuple[int, tuple[Axis, ...]]:
    kernel_blocks, rest = divmod(tensor.shape[at["block"]], blocks.count)
    if rest or not kernel_blocks:
        raise UnknownShape(
            f"{tensor.layer}: {tensor.shape[at['block']]} kernel blocks do not make {blocks.count} blocks"
        )
    local_tokens = kernel_blocks * tensor.shape[at["token"]]
    _expect(tensor, "tokens a block", local_tokens * blocks.context.size, blocks.tokens)
    return kernel_blocks, token_axes(
        kernel_blocks=kernel_blocks,
        kernel_tokens=tensor.shape[at["token"]],
        kernel_stride=tensor.strides[at["block"]],
        token_stride=tensor.strides[at["token"]],
        context=blocks.context,
    )


def _expect(tensor: LiveTensor, what: str, have: int, want: int) -> None:
    if have != want:
        raise UnknownShape(f"{tensor.layer}: {what} is {have} in the tensor and {want} in the spec")


def _expect_heads(tensor: LiveTensor, have: int, heads: Share) -> None:
    if have != heads.extent:
        raise UnknownShape(f"{tensor.layer}: the tensor has {have} heads, the spec says {heads.extent}")


def _layer(tensor: LiveTensor, regions: Sequence[Region], fields: tuple[Field, ...], stride: int) -> Layer:
    region = find_region(regions, tensor.address, tensor.layer)
    return Layer(
        name=tensor.layer,
        page=Page(size=max(f.end for f in fields), fields=fields),
        region=region,
        offset=tensor.address - regions[region].address,
        stride=stride,
    )
