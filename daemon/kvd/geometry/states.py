"""Geometry of what a request keeps whatever its length: recurrent states, and circular buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from kvd.geometry.errors import UnknownShape
from kvd.geometry.live import LiveTensor, dims_of, expect, layer_of
from kvd.geometry.model import Axis, Field, Layer, Region
from kvd.geometry.shards import ConvSection, Share, conv_fields, share, state_field

StateFamily = Literal["mamba1", "mamba2", "gdn", "short_conv", "linear"]
"""``short_conv`` has a convolution state only, ``linear`` a recurrent one only."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a state layer keeps: this rank's convolution and recurrent shapes as vLLM's spec gives them.

    ``heads`` is the model's number of recurrent heads (channels for mamba1), ``groups`` its number of B/C
    groups (mamba2), ``conv`` and ``ssm`` are (shape, dtype, item size), None where the family has none.
    """

    family: StateFamily
    conv: tuple[tuple[int, ...], str, int] | None
    ssm: tuple[tuple[int, ...], str, int] | None
    heads: int
    groups: int = 1
    channels_first: bool = False


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
    return layer_of(tensor, regions, state_fields(state, rank, ranks), block_stride)


def state_fields(state: StateShape, rank: int, ranks: int) -> tuple[Field, ...]:
    """Fields of one state page on ``rank`` of ``ranks``.

    Section widths follow from the shapes alone: the recurrent state tells the value part, the rest is shared
    evenly by the other two sections (``B``/``C`` of Mamba2, ``q``/``k`` of Gated DeltaNet).
    """
    fields: list[Field] = []
    heads = share(f"{state.family} heads", state.heads, rank, ranks)
    at = 0
    if state.conv is not None:
        shape, dtype, size = state.conv
        first = state.channels_first or state.family == "mamba1"
        channels, taps = shape if first else shape[::-1]
        sections = _sections(state, channels, rank, ranks)
        fields += conv_fields(dtype=dtype, itemsize=size, sections=sections, taps=taps, channels_first=first)
        at = prod(shape) * size
    if state.ssm is not None:
        shape, dtype, size = state.ssm
        if shape[0] != heads.extent:
            raise UnknownShape(
                f"a {state.family} state of {shape[0]} heads on one of {ranks} ranks, of {state.heads} in all"
            )
        fields.append(state_field(dtype=dtype, itemsize=size, offset=at, heads=heads, inner=shape[1:]))
    return tuple(fields)


def _sections(state: StateShape, channels: int, rank: int, ranks: int) -> tuple[ConvSection, ...]:
    if state.family in ("mamba1", "short_conv") or state.ssm is None:
        return (ConvSection("x", Share(rank * channels, channels, channels * ranks)),)
    value = state.ssm[0][0] * state.ssm[0][1]
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


def ring_layer(tensor: LiveTensor, regions: Sequence[Region], *, count: int) -> Layer:
    """The layer of a circular buffer ``(block, slot, row, content)``: one of ``count`` blocks holds a request's.

    A row stands at a token's position modulo the rows, so both sides must have as many. Every worker holds all of it.
    Raises `UnknownShape` where a block is several kernel blocks.
    """
    at = dims_of(tensor, ("block", "head", "token", "dim"))
    expect(tensor, "blocks of circular buffers", tensor.shape[at["block"]], count)
    sizes = [("slot", at["head"]), ("row", at["token"]), ("dim", at["dim"])]
    fld = Field(
        name="ring",
        dtype=tensor.dtype,
        itemsize=tensor.itemsize,
        offset=0,
        axes=tuple(Axis(label, 0, tensor.shape[i], 1, tensor.strides[i]) for label, i in sizes),
        shape=tuple((label, tensor.shape[i]) for label, i in sizes),
    )
    return layer_of(tensor, regions, (fld,), tensor.strides[at["block"]])


def whole_state_layer(
    tensor: LiveTensor, regions: Sequence[Region], *, size: int, packing: str, rank: int, ranks: int
) -> Layer:
    """The layer of a state of ``size`` bytes whose parts are not known: it moves whole, from the same rank of as many.

    ``packing`` says what is in there, and must be the same on both sides.
    """
    axes = (Axis("state shards", rank, 1, 1, 0), Axis("byte", 0, size, 1, 1))
    fld = Field("state", packing, 1, 0, axes, (("state shards", ranks), ("byte", size)))
    return layer_of(tensor, regions, (fld,), tensor.strides[0])
