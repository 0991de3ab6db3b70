"""Geometry from live tensors: their own shape and stride say where the bytes stand, never a layout flag.

The caller (`kvd.vllm`) strips its tensors down to `LiveTensor`, so nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kvd.geometry.errors import UnknownShape
from kvd.geometry.model import Axis, Field, Layer, Page, Region
from kvd.geometry.shards import (
    WHOLE_CONTEXT,
    ContextShare,
    Placement,
    Share,
    kv_fields,
    latent_field,
    token_axes,
)

Dim = Literal["kv", "block", "head", "token", "dim", "key+value"]
"""What one dimension of a cache tensor is.

``kv`` picks K or V, ``key+value`` holds both one after the other.
"""

ONE_TOKEN = Fraction(1)
"""Tokens of one entry of most caches."""


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
class BlockAxes:
    """How many blocks the worker has and how many tokens a block covers on the engine as a whole."""

    count: int
    tokens: int
    context: ContextShare = WHOLE_CONTEXT


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
    blocks: BlockAxes,
    heads: Share,
    key_size: int,
    value_size: int,
) -> Layer:
    """The layer of a tensor with heads.

    ``dims`` names the tensor's dimensions. A tensor with more blocks than the worker has holds kernel blocks:
    a block is ``shape[block] / blocks.count`` of them. Raises `UnknownShape` where shape and facts disagree.
    """
    at = dims_of(tensor, dims)
    kernel_blocks, tokens = _tokens(tensor, at, blocks)
    _expect_heads(tensor, tensor.shape[at["head"]], heads)
    if "key+value" in at:
        inner = at["key+value"]
        expect(tensor, "key and value size", tensor.shape[inner], key_size + value_size)
        value_offset = key_size * tensor.strides[inner]
    else:
        inner = at["dim"]
        expect(tensor, "head size", tensor.shape[inner], key_size)
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
    return layer_of(tensor, regions, fields, kernel_blocks * tensor.strides[at["block"]])


Packing = Literal["vec", "amx", "opaque"]
"""How vLLM's CPU attention arranges a head's block behind the shape that its tensor shows."""
TILE_ROWS, TILE_PAIR = 16, 2
"""Of `amx`: rows of a tile, and how many neighbours of a row stand together."""


def cpu_attention_layer(
    tensor: LiveTensor,
    regions: Sequence[Region],
    *,
    blocks: BlockAxes,
    heads: Share,
    key_size: int,
    value_size: int,
    packing: Packing,
) -> Layer:
    """The layer of a ``CPU_ATTN`` tensor ``(block, head, token, key + value)``, whose shape is not its content.

    For each head of a kernel block stand all keys and then all values (vllm/v1/attention/backends/cpu_attn.py
    views it as ``(block, head, 2 * token, size)``). With ``vec`` kernels keys are transposed, ``(size,
    token)``, and values are ``(token, size)``. ``amx`` kernels have tiles of both: a key is a row of its tile, a
    value a column (`_tiles`). What other kernels do is not known here: ``opaque`` blocks move whole, so they fit
    only blocks of the same size. Raises `UnknownShape` where shape and facts disagree.
    """
    at = dims_of(tensor, ("block", "head", "token", "key+value"))
    kernel_blocks, _ = _tokens(tensor, at, blocks)
    _expect_heads(tensor, tensor.shape[at["head"]], heads)
    expect(tensor, "key and value size", tensor.shape[at["key+value"]], key_size + value_size)
    item, tokens, stride = tensor.itemsize, tensor.shape[at["token"]], tensor.strides[at["block"]]
    head = Axis("head", heads.start, heads.extent, 1, tensor.strides[at["head"]])
    fields = []
    for name, size, offset in (("k", key_size, 0), ("v", value_size, tokens * key_size * item)):
        shape: tuple[tuple[str, int], ...] = (("token", blocks.tokens), ("dim", size))
        # Only a share of the tokens in the order of the block: what a rank of several holds has no tiles of its own.
        if packing == "amx" and blocks.context.size == 1:
            rows, columns = (("token", tokens), ("dim", size))[:: 1 if name == "k" else -1]
            inner = (*_several("token", kernel_blocks, tokens, stride), *_tiles(tensor, rows, columns))
        elif packing == "vec":
            token, dim = (item, tokens * item) if name == "k" else (size * item, item)
            inner = (
                *token_axes(
                    kernel_blocks=kernel_blocks,
                    kernel_tokens=tokens,
                    kernel_stride=stride,
                    token_stride=token,
                    context=blocks.context,
                ),
                Axis("dim", 0, size, 1, dim),
            )
        else:
            inner = (
                Axis("packed", 0, kernel_blocks, tokens * size, stride),
                Axis("packed", 0, tokens * size, 1, item),
            )
            shape = (("packed", kernel_blocks * tokens * size),)
        whole = (("head", heads.total), *shape)
        fields.append(Field(name, tensor.dtype, item, offset, (head, *inner), whole))
    return layer_of(tensor, regions, tuple(fields), kernel_blocks * stride)


def _several(label: str, count: int, step: int, stride: int) -> tuple[Axis, ...]:
    return (Axis(label, 0, count, step, stride),) if count > 1 else ()


def _tiles(tensor: LiveTensor, rows: tuple[str, int], columns: tuple[str, int]) -> tuple[Axis, ...]:
    """A matrix in tiles of 16 rows: in a tile stand the first two columns of each row, then the next two, and so on.

    Seen in vLLM 0.32, with elements of one byte as of two: the test of `cpu_attention_layer` looks where its kernel
    writes. Raises `UnknownShape` where the matrix has no whole tiles.
    """
    (row, height), (column, width) = rows, columns
    expect(tensor, f"{row}s beyond whole tiles", height % TILE_ROWS, 0)
    expect(tensor, f"{column}s beyond whole pairs", width % TILE_PAIR, 0)
    item = tensor.itemsize
    return (
        *_several(row, height // TILE_ROWS, TILE_ROWS, TILE_ROWS * width * item),
        *_several(column, width // TILE_PAIR, TILE_PAIR, TILE_ROWS * TILE_PAIR * item),
        Axis(row, 0, TILE_ROWS, 1, TILE_PAIR * item),
        Axis(column, 0, TILE_PAIR, 1, item),
    )


def latent_layer(
    tensor: LiveTensor, regions: Sequence[Region], *, dims: Sequence[Dim], blocks: BlockAxes, size: int
) -> Layer:
    """The layer of an MLA tensor: one latent a token, the same on every tensor-parallel rank."""
    at = dims_of(tensor, dims)
    kernel_blocks, tokens = _tokens(tensor, at, blocks)
    expect(tensor, "latent size", tensor.shape[at["dim"]], size)
    fld = latent_field(
        dtype=tensor.dtype,
        itemsize=tensor.itemsize,
        tokens=tokens,
        block_tokens=blocks.tokens,
        size=size,
        dim_stride=tensor.strides[at["dim"]],
    )
    return layer_of(tensor, regions, (fld,), kernel_blocks * tensor.strides[at["block"]])


def packed_layer(
    tensor: LiveTensor,
    regions: Sequence[Region],
    *,
    blocks: BlockAxes,
    heads: Share | None,
    cell: int,
    packing: str,
) -> Layer:
    """The layer of a quantised tensor ``(block, head, token, cell)``.

    Values and their scales packed into one cell.

    What stands inside a cell of ``cell`` bytes is not looked at: it moves whole. So heads and tokens can be resharded,
    and ``packing``, vLLM's name of the format, must be the same on both sides. ``heads`` is None where all ranks hold
    the same cells (MLA). Raises `UnknownShape` where shape and facts disagree.
    """
    at = dims_of(tensor, ("block", "head", "token", "dim"))
    kernel_blocks, tokens = _tokens(tensor, at, blocks)
    expect(tensor, "bytes a cell", tensor.shape[at["dim"]] * tensor.itemsize, cell)
    expect(tensor, "bytes between the elements of a cell", tensor.strides[at["dim"]], tensor.itemsize)
    expect(tensor, "heads", tensor.shape[at["head"]], heads.extent if heads else 1)
    axes = (*tokens, Axis("byte", 0, cell, 1, 1))
    shape: tuple[tuple[str, int], ...] = (("token", blocks.tokens), ("byte", cell))
    if heads is not None:
        axes = (Axis("head", heads.start, heads.extent, 1, tensor.strides[at["head"]]), *axes)
        shape = (("head", heads.total), *shape)
    fld = Field(name="cell", dtype=packing, itemsize=1, offset=0, axes=axes, shape=shape)
    return layer_of(tensor, regions, (fld,), kernel_blocks * tensor.strides[at["block"]])


def whole_block_layer(
    tensor: LiveTensor,
    regions: Sequence[Region],
    *,
    blocks: BlockAxes,
    packing: str,
    covers: Fraction = ONE_TOKEN,
    heads: Share | None = None,
) -> Layer:
    """The layer of a tensor ``(block, slot, entry, cell)`` whose shape is not its content: kernel blocks move whole.

    The caches of sparse attention hold the values of all tokens of a kernel block first and then all scales, so a
    token's bytes stand in two places. Others keep an entry for several tokens, ``covers`` of them, or arrange keys and
    values of all ``heads`` of a worker in slots of their own. ``heads`` is None where all workers hold the same.
    ``packing`` says what is in there. Both sides must have the same ``packing``, tokens of a kernel block (a block may
    be several), context parallelism and split of heads. Raises `UnknownShape` where shape and facts disagree or a cell
    is not one piece.
    """
    at = dims_of(tensor, ("block", "head", "token", "dim"))
    kernel_blocks, _ = _tokens(tensor, at, blocks, covers)
    context, slots, entries = blocks.context, tensor.shape[at["head"]], tensor.shape[at["token"]]
    kernel_tokens = int(entries * covers)
    cell = tensor.shape[at["dim"]] * tensor.itemsize
    expect(tensor, "bytes between the elements of a cell", tensor.strides[at["dim"]], tensor.itemsize)
    size = entries * cell
    axes: list[Axis] = [
        Axis("token", 0, kernel_blocks, kernel_tokens * context.size, tensor.strides[at["block"]]),
        Axis("byte", 0, size, 1, 1),
    ]
    shape = [("token", blocks.tokens), ("byte", size)]
    text = f"{packing}, blocks of {kernel_tokens} tokens"
    if heads is None:
        expect(tensor, "heads", slots, 1)
        expect(tensor, "bytes between tokens", tensor.strides[at["token"]], cell)
    else:
        axes[1:] = [
            Axis("slot", 0, slots, 1, tensor.strides[at["head"]]),
            Axis("entry", 0, entries, 1, tensor.strides[at["token"]]),
            Axis("byte", 0, cell, 1, 1),
        ]
        shape[1:] = [("slot", slots), ("entry", entries), ("byte", cell)]
        axes.insert(0, Axis("head shards", heads.start // heads.extent, 1, 1, 0))
        shape.insert(0, ("head shards", heads.total // heads.extent))
        if tensor.strides[at["head"]] < tensor.strides[at["token"]] and slots > 1:
            text += ", tokens before slots"
    if covers != 1:
        text += f", {covers} an entry"
    if context.size > 1:
        axes.insert(0, Axis("context", context.rank, 1, 1, 0))
        shape.insert(0, ("context", context.size))
        text = f"{packing}, {context.interleave} tokens in a row{text.removeprefix(packing)}"
    fld = Field("block", text, 1, 0, tuple(axes), tuple(shape))
    return layer_of(tensor, regions, (fld,), kernel_blocks * tensor.strides[at["block"]])


def dims_of(tensor: LiveTensor, dims: Sequence[Dim]) -> dict[str, int]:
    """Where each dimension stands. Raises `UnknownShape` where the tensor has another number of them."""
    if len(dims) != len(tensor.shape):
        raise UnknownShape(
            f"{tensor.layer}: a tensor of {len(tensor.shape)} dimensions {tensor.shape}, expected {tuple(dims)}"
        )
    return {name: i for i, name in enumerate(dims)}


def _tokens(
    tensor: LiveTensor, at: dict[str, int], blocks: BlockAxes, covers: Fraction = ONE_TOKEN
) -> tuple[int, tuple[Axis, ...]]:
    """Kernel blocks of a block, and the axes of their tokens where an entry is of one token."""
    kernel_blocks, rest = divmod(tensor.shape[at["block"]], blocks.count)
    if rest or not kernel_blocks:
        raise UnknownShape(
            f"{tensor.layer}: {tensor.shape[at['block']]} kernel blocks do not make {blocks.count} blocks"
        )
    local_tokens = kernel_blocks * tensor.shape[at["token"]] * covers
    expect(tensor, "tokens a block", local_tokens * blocks.context.size, blocks.tokens)
    return kernel_blocks, token_axes(
        kernel_blocks=kernel_blocks,
        kernel_tokens=tensor.shape[at["token"]],
        kernel_stride=tensor.strides[at["block"]],
        token_stride=tensor.strides[at["token"]],
        context=blocks.context,
    )


def expect(tensor: LiveTensor, what: str, have: int | Fraction, want: int) -> None:
    """Raise `UnknownShape` unless what the tensor shows is what vLLM's spec says."""
    if have != want:
        raise UnknownShape(f"{tensor.layer}: {what} is {have} in the tensor and {want} in the spec")


def _expect_heads(tensor: LiveTensor, have: int, heads: Share) -> None:
    if have != heads.extent:
        raise UnknownShape(f"{tensor.layer}: the tensor has {have} heads, the spec says {heads.extent}")


def layer_of(tensor: LiveTensor, regions: Sequence[Region], fields: tuple[Field, ...], stride: int) -> Layer:
    """A layer with these fields, whose blocks are ``stride`` bytes apart, in the region that holds the tensor."""
    region = find_region(regions, tensor.address, tensor.layer)
    return Layer(
        name=tensor.layer,
        page=Page(size=max(f.end for f in fields), fields=fields),
        region=region,
        offset=tensor.address - regions[region].address,
        stride=stride,
    )
