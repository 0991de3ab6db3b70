"""How logical tensors are split over ranks: pages of attention, MLA and state-space layers as fields.

Every function here turns "what the model has in all, which rank this is, where the bytes stand" into fields. None of
them knows a memory layout: strides come from the caller, who took them from a live tensor or computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.geometry.errors import BadGeometry, UnevenShard
from kvd.geometry.model import Axis, Field


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of one label: elements ``start .. start + extent`` of ``total``."""

    start: int
    extent: int
    total: int


@dataclass(frozen=True, slots=True)
class ContextShare:
    """A rank's part of the tokens under decode context parallelism.

    Of every ``size * interleave`` consecutive tokens, rank ``rank`` holds ``interleave``.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1


WHOLE_CONTEXT = ContextShare()
"""All tokens: no decode context parallelism."""


def share(what: str, total: int, rank: int, ranks: int) -> Share:
    """The part of ``total`` things (heads, channels) that ``rank`` of ``ranks`` holds.

    With more ranks than things, consecutive ranks hold the same one: start ``floor(rank * total / ranks)``, extent
    ``max(1, total / ranks)``. Raises `UnevenShard` where neither divides the other, `BadGeometry` where there is
    nothing to share or no such rank.
    """
    if total < 1 or not 0 <= rank < ranks:
        raise BadGeometry(f"rank {rank} of {ranks} cannot hold a part of {total} {what}")
    if total % ranks and ranks % total:
        raise UnevenShard(f"{total} {what} cannot be split over {ranks} ranks: neither divides the other")
    return Share(start=rank * total // ranks, extent=max(1, total // ranks), total=total)


def token_axes(
    *,
    kernel_blocks: int,
    kernel_tokens: int,
    kernel_stride: int,
    token_stride: int,
    context: ContextShare = WHOLE_CONTEXT,
) -> tuple[Axis, ...]:
    """The ``token`` axes of a page of ``kernel_blocks`` kernel blocks of ``kernel_tokens`` local tokens each.

    Strides are in bytes; coordinates are tokens of the block on the engine as a whole, so a context-parallel rank holds
    every ``context.size``-th run of ``context.interleave``. Axes of extent 1 that carry no start are left out.
    """
    run = context.interleave if context.size > 1 else kernel_tokens
    if kernel_tokens % run:
        raise UnevenShard(f"kernel blocks of {kernel_tokens} tokens cannot be interleaved in runs of {run}")
    axes = [
        Axis("token", 0, kernel_blocks, kernel_tokens * context.size, kernel_stride),
        Axis("token", 0, kernel_tokens // run, run * context.size, run * token_stride),
        Axis("token", context.rank * run if context.size > 1 else 0, run, 1, token_stride),
    ]
    return (*(a for a in axes[:2] if a.extent > 1), axes[2])


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the keys and values of a page stand: strides between heads and inside a head, offsets; all in bytes."""

    head_stride: int
    dim_stride: int
    key_offset: int
    value_offset: int


def kv_fields(
    *,
    dtype: str,
    itemsize: int,
    heads: Share,
    tokens: tuple[Axis, ...],
    block_tokens: int,
    key_size: int,
    value_size: int,
    place: Placement,
) -> tuple[Field, ...]:
    """Fields ``k`` and ``v`` of a page with heads: K and V may stand in one tensor (offsets differ) or apart."""

    def one(name: str, size: int, offset: int) -> Field:
        return Field(
            name=name,
            dtype=dtype,
            itemsize=itemsize,
            offset=offset,
            axes=(
                Axis("head", heads.start, heads.extent, 1, place.head_stride),
                *tokens,
                Axis("dim", 0, size, 1, place.dim_stride),
            ),
            shape=(("head", heads.total), ("token", block_tokens), ("dim", size)),
        )

    return (one("k", key_size, place.key_offset), one("v", value_size, place.value_offset))


def latent_field(
    *,
    dtype: str,
    itemsize: int,
    tokens: tuple[Axis, ...],
    block_tokens: int,
    size: int,
    dim_stride: int,
) -> Field:
    """Field ``latent`` of an MLA page (latent and rope part together): no head axis, the same box on every rank."""
    return Field(
        name="latent",
        dtype=dtype,
        itemsize=itemsize,
        offset=0,
        axes=(*tokens, Axis("dim", 0, size, 1, dim_stride)),
        shape=(("token", block_tokens), ("dim", size)),
    )


@dataclass(frozen=True, slots=True)
class ConvSection:
    """One section of a convolution state (``x``, ``B``, ``C`` or ``q``, ``k``, ``v``) and this rank's part of it."""

    name: str
    channels: Share


def conv_fields(
    *,
    dtype: str,
    itemsize: int,
    sections: Sequence[ConvSection],
    taps: int,
    channels_first: bool,
) -> tuple[Field, ...]:
    """Fields ``conv.<section>`` of a state page.

    The state is a dense matrix of ``taps`` (kernel width - 1, plus speculative positions) by all local channels,
    section after section; ``channels_first`` says which of the two is outermost.
    """
    width = sum(s.channels.extent for s in sections)
    channel_stride, tap_stride = (
        (taps * itemsize, itemsize) if channels_first else (itemsize, width * itemsize)
    )
    fields, first = [], 0
    for section in sections:
        part = section.channels
        fields.append(
            Field(
                name=f"conv.{section.name}",
                dtype=dtype,
                itemsize=itemsize,
                offset=first * channel_stride,
                axes=(
                    Axis("tap", 0, taps, 1, tap_stride),
                    Axis("channel", part.start, part.extent, 1, channel_stride),
                ),
                shape=(("tap", taps), ("channel", part.total)),
            )
        )
        first += part.extent
    return tuple(fields)


def state_field(*, dtype: str, itemsize: int, offset: int, heads: Share, inner: Sequence[int]) -> Field:
    """Field ``ssm`` of a state page: heads (or channels) sharded, ``inner`` axes whole, dense in that order."""
    labels = ("head", "row", "state", "inner")
    sizes = (heads.extent, *inner)
    strides = [itemsize] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * sizes[i + 1]
    axes = [Axis("head", heads.start, heads.extent, 1, strides[0])]
    axes += [Axis(labels[i], 0, sizes[i], 1, strides[i]) for i in range(1, len(sizes))]
    shape = (("head", heads.total), *((labels[i], sizes[i]) for i in range(1, len(sizes))))
    return Field(name="ssm", dtype=dtype, itemsize=itemsize, offset=offset, axes=tuple(axes), shape=shape)
