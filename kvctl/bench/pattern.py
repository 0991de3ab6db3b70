"""Known bytes for a request's blocks, and the comparison of what landed with them.

What an element must be follows from (request, layer, field, logical index, absolute token) alone. So each side computes
it for itself, whatever ranks, layouts and block sizes the two have, and a byte at a wrong place is seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvctl.bench.memory import Memory
from kvd.geometry.model import Field, Group, Layer
from kvd.topology.blocks import BlockList
from kvd.topology.descriptors import Int64

Values = NDArray[np.unsignedinteger[Any]]


def fill(memory: Memory, blocks: Mapping[int, BlockList], request: str) -> None:
    """Write what a request's blocks must hold; ``blocks`` are by group."""
    for part in _parts(memory, blocks, request):
        part.view[...] = part.values()


def clear(memory: Memory, blocks: Mapping[int, BlockList]) -> None:
    """Zero every field of the blocks."""
    for part in _parts(memory, blocks, ""):
        part.view[...] = 0


def first_difference(memory: Memory, blocks: Mapping[int, BlockList], request: str, tokens: int) -> str:
    """Where the first ``tokens`` tokens of a request's blocks hold something else than they must; empty: nowhere."""
    for part in _parts(memory, blocks, request):
        values = part.values()
        wrong = part.view != values
        if part.group.kind != "mamba" and (part.number + 1) * part.group.block_size > tokens:
            wrong &= part.token < tokens
        if wrong.any():
            index = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            where = f"{part.layer.name}, {part.field.name}, block {part.number}, element {index}"
            return f"{where}: {part.view[index]:#x} where {values[index]:#x} was expected"
    return ""


class _PageField(NamedTuple):
    """One field of one page: the bytes that are there, and what the right ones are made of."""

    group: Group
    layer: Layer
    field: Field
    number: int
    view: Values
    token: Int64
    base: Values
    salt: int

    def values(self) -> Values:
        """``base * odd(token) + other(token)``, so that neither a wrong token nor a wrong element goes unseen."""
        dtype = self.view.dtype
        odd, other = (
            _mixed(self.token, self.salt, dtype) | dtype.type(1),
            _mixed(self.token, ~self.salt, dtype),
        )
        made: Values = self.base * odd
        made += other
        return made


def _parts(memory: Memory, blocks: Mapping[int, BlockList], request: str) -> Iterator[_PageField]:
    worker = memory.geometry
    bases: dict[Field, tuple[Values, Int64]] = {}
    for group in worker.groups:
        if group.index not in blocks:
            continue
        numbered = list(enumerate(blocks[group.index].ids.tolist(), blocks[group.index].first))
        seen: set[tuple[int, int, int]] = set()
        for layer in group.layers:
            # A layer that reuses another's cache stands at the same place, and has the other's bytes.
            if (here := (layer.region, layer.offset, layer.stride)) in seen:
                continue
            seen.add(here)
            for field in layer.page.fields:
                if field not in bases:
                    bases[field] = _base(field)
                base, token = bases[field]
                salt = zlib.crc32(f"{request}, {layer.name}, {field.name}".encode())
                for number, block in numbered:
                    start = layer.offset + block * layer.stride
                    view = _view(memory.regions[layer.region], start, field)
                    first = number if group.kind == "mamba" else number * group.block_size
                    yield _PageField(group, layer, field, number, view, token + first, base, salt)


def _view(memory: NDArray[np.uint8], page: int, field: Field) -> Values:
    """A field of the page at byte ``page`` of the memory, as unsigned integers of its item size."""
    return np.ndarray(
        shape=tuple(axis.extent for axis in field.axes),
        dtype=f"u{field.itemsize}",
        buffer=memory.data,
        offset=page + field.offset,
        strides=tuple(axis.stride for axis in field.axes),
    )


def _base(field: Field) -> tuple[Values, Int64]:
    """Mixed bits of the logical index without its token, and the token within the block; they broadcast together."""
    axes = len(field.axes)
    index = np.zeros([1] * axes, np.int64)
    token = np.zeros([1] * axes, np.int64)
    for label, extent in field.shape:
        if label != "token":
            index = index * extent
        for position, axis in enumerate(field.axes):
            if axis.label != label:
                continue
            along = axis.start + np.arange(axis.extent, dtype=np.int64) * axis.step
            along = along.reshape([-1 if at == position else 1 for at in range(axes)])
            if label == "token":
                token = token + along
            else:
                index = index + along
    return _mixed(index, 0, np.dtype(f"u{field.itemsize}")), token


def _mixed(numbers: Int64, salt: int, dtype: np.dtype[Any]) -> Values:
    mixed = numbers.astype(np.uint64) + np.uint64((salt & 0xFFFFFFFF) << 32)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    made: Values = (mixed >> np.uint64(64 - 8 * dtype.itemsize)).astype(dtype)
    return made
