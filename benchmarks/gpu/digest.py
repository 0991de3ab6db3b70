"""Sums over the pages of a worker's KV cache that are equal on two workers only where the bytes are.

Elements are taken by their place in the logical tensor (head or channel, token, the rest), never by where they
stand: so engines with other block sizes, layouts or numbers of workers can be held against each other. Each element is
multiplied by a number that is drawn from its place; what has moved changes the sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from kvd.geometry.model import Field, Group, Layer, WorkerGeometry

SHARED_OUT = ("head", "channel")
"""Labels that tensor parallelism divides: their elements get a sum each."""
TOKEN = "token"  # noqa: S105 - a label
_DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Span = tuple[int, int]
"""First token and the one behind the last."""
Blocks = tuple[int, Sequence[int]]
"""Which block of the request the first is, and ids."""
Sums = dict[str, list[tuple[int, int]]]
"""``LAYER FIELD`` to sums by the global index of the head or channel (0 where there is neither)."""


def span_of(group: Group, blocks: Blocks, tokens: int) -> Span:
    """The tokens of a request of ``tokens`` that blocks hold; of a state all of them, whatever the blocks."""
    if group.kind == "mamba":
        return 0, tokens
    first, ids = blocks
    return first * group.block_size, min(tokens, (first + len(ids)) * group.block_size)


def digest(geometry: WorkerGeometry, blocks: Mapping[int, Blocks], spans: Mapping[int, Span]) -> Sums:
    """The sums of all layers of these groups, over these spans of tokens.

    Raises `ValueError` where blocks do not hold a span.
    """
    memory = memory_of(geometry)
    sums: Sums = {}
    for group in geometry.groups:
        if group.index not in blocks:
            continue
        for layer in group.layers:
            for field in layer.page.fields:
                sums[f"{layer.name} {field.name}"] = _sums(
                    memory[layer.region], group, layer, field, blocks[group.index], spans[group.index]
                )
    return sums


def memory_of(geometry: WorkerGeometry) -> list[Any]:
    """Each region of a worker's memory as a tensor of bytes."""
    return [_memory(region.address, region.length, region.device) for region in geometry.regions]


def elements_of(memory: Any, layer: Layer, field: Field, blocks: int) -> Any:
    """A field's elements in the first ``blocks`` blocks, as integers of their size: (block, then the field's axes).

    Raises `ValueError` where elements do not stand on multiples of their size.
    """
    import torch

    size = field.itemsize
    offset = layer.offset + field.offset
    strides = [layer.stride, *(axis.stride for axis in field.axes)]
    if any(value % size for value in (offset, *strides)):
        raise ValueError(
            f"{layer.name} {field.name}: elements of {size} bytes do not stand on multiples of that"
        )
    room = memory.shape[0] // size * size
    elements = memory[:room].view(getattr(torch, _DTYPES[size]))
    shape = (blocks, *(axis.extent for axis in field.axes))
    return elements.as_strided(shape, tuple(value // size for value in strides), offset // size)


def _memory(address: int, length: int, device: str) -> Any:
    """A span of memory as a tensor of bytes."""
    import torch

    if device.startswith("cpu"):
        return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)

    class Span:
        __cuda_array_interface__ = {  # noqa: RUF012 - numba's protocol
            "shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Span(), device=device)


def _sums(
    memory: Any, group: Group, layer: Layer, field: Field, blocks: Blocks, span: Span
) -> list[tuple[int, int]]:
    import torch

    first, ids = blocks
    view = elements_of(memory, layer, field, 1 + max(ids, default=0))
    picked = view[torch.tensor(list(ids), device=memory.device, dtype=torch.int64)]
    places = places_of(field, len(ids))
    picked = picked.permute(places.order).reshape(places.shares, places.tokens, -1).to(torch.int64)
    if places.by_token:
        begin, end = span[0] - first * group.block_size, span[1] - first * group.block_size
        if begin < 0 or end > places.tokens:
            raise ValueError(f"{layer.name}: blocks from number {first} do not hold tokens {span}")
        picked = picked[:, begin:end]
    weights = _weights(span[0] if places.by_token else 0, picked.shape[1], picked.shape[2], memory.device)
    sums = (picked * weights).sum(dim=(1, 2)).tolist()
    return list(zip(places.indices, sums, strict=True))


@dataclass(frozen=True, slots=True)
class Places:
    """How a picked field's dimensions (block, then its axes) become (share, token, rest).

    ``indices`` are the shares' global ones, ``by_token`` says whether the field has tokens at all.
    """

    order: tuple[int, ...]
    shares: int
    tokens: int
    by_token: bool
    indices: tuple[int, ...]


def places_of(field: Field, blocks: int) -> Places:
    """Where the elements of so many blocks belong."""
    numbered = list(enumerate(field.axes, start=1))
    shared = [(i, a) for i, a in numbered if a.label in SHARED_OUT]
    tokens = sorted(((i, a) for i, a in numbered if a.label == TOKEN), key=lambda pair: -pair[1].step)
    rest = [i for i, a in numbered if a.label not in (*SHARED_OUT, TOKEN)]
    indices = [0]
    for _, axis in shared:
        indices = [had * 10**6 + axis.start + i * axis.step for had in indices for i in range(axis.extent)]
    return Places(
        order=(*(i for i, _ in shared), 0, *(i for i, _ in tokens), *rest),
        shares=prod(a.extent for _, a in shared),
        tokens=blocks * prod(a.extent for _, a in tokens),
        by_token=bool(tokens),
        indices=tuple(indices),
    )


def _weights(first: int, tokens: int, rest: int, device: Any) -> Any:
    """Odd numbers that depend on token and place within it, the same on every device."""
    import torch

    mixed = torch.arange(first * rest, (first + tokens) * rest, device=device, dtype=torch.int64)
    for factor in (-7046029254386353131, -4658895280553007687, -7723592293110705685):
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 29)
    return (mixed | 1).reshape(tokens, rest)
