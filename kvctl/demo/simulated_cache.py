"""The KV cache of a simulated worker: a numpy buffer cut up as vLLM cuts up a hybrid model's, and known bytes in it.

The model is the demo's own (kvctl.demo.models, `qwen3.5-gdn`) with twice the layers: three of four keep a Gated
DeltaNet state, the fourth full attention. As in vLLM all groups share the same memory, page by page, and tell their
blocks apart by id. What a page must hold follows from (request, layer, field, logical index) alone, so each side
computes for itself which bytes are right, whatever ranks it has.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.live import Blocks, LiveTensor, StateShape, attention_layer, state_layer
from kvd.geometry.model import Field, Group, Layer, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.geometry.shards import share
from kvd.topology.blocks import BlockList

MODEL = "simulated/qwen3.5-gdn"
LAYERS, PERIOD = 8, 4
"""Every `PERIOD`-th layer has full attention; the layers at one place in the period make a group."""
KV_HEADS, HEAD_SIZE = 2, 64
KEY_HEADS, VALUE_HEADS, STATE_SIZE, TAPS = 2, 4, 128, 3
BLOCK_TOKENS = 640
"""vLLM makes the attention block so large that its page is no smaller than a state."""
TOKEN_BYTES = 2 * HEAD_SIZE * 2
"""Key and value of one head of one token in bfloat16."""

Bytes = NDArray[np.uint8]
Values = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Cache:
    """One worker's memory and its description."""

    memory: Bytes
    geometry: WorkerGeometry


def make_cache(blocks: int, rank: int, ranks: int) -> Cache:
    """The zeroed cache of worker ``rank`` of ``ranks`` (1, 2 or 4) with room for ``blocks`` blocks."""
    page = share("KV heads", KV_HEADS, rank, ranks).extent * BLOCK_TOKENS * TOKEN_BYTES
    memory = np.zeros(LAYERS // PERIOD * blocks * page, np.uint8)
    return Cache(memory, _geometry(memory, blocks, page, rank, ranks))


def sibling_geometries(cache: Cache, ranks: int) -> tuple[WorkerGeometry, ...]:
    """What all workers of the engine look like: they differ in which heads they hold, not in shape."""
    blocks = cache.geometry.num_blocks
    page = len(cache.memory) // (LAYERS // PERIOD * blocks)
    return tuple(_geometry(cache.memory, blocks, page, rank, ranks) for rank in range(ranks))


def fill(cache: Cache, blocks: Mapping[int, BlockList], request: str) -> int:
    """Write what a request's blocks must hold; return the bytes written. ``blocks`` are by group."""
    written = 0
    for _, view, values in _fields(cache, blocks, request):
        view[...] = values
        written += values.nbytes
    return written


def first_difference(cache: Cache, blocks: Mapping[int, BlockList], request: str) -> str:
    """Where a request's blocks first hold something else than they must; empty where they don't."""
    for where, view, values in _fields(cache, blocks, request):
        if not np.array_equal(view, values):
            index = tuple(int(axis[0]) for axis in np.nonzero(view != values))
            return f"{where}, element {index}: {view[index]:#x} where {values[index]:#x} was expected"
    return ""


def bytes_of(tokens: int) -> int:
    """Bytes that ``tokens`` tokens of one request take in the whole model: states, and whole attention blocks."""
    channels = 2 * KEY_HEADS * STATE_SIZE + VALUE_HEADS * STATE_SIZE
    state = TAPS * channels * 2 + VALUE_HEADS * STATE_SIZE * STATE_SIZE * 4
    attention = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * KV_HEADS * TOKEN_BYTES
    return LAYERS // PERIOD * ((PERIOD - 1) * state + attention)


def _geometry(memory: Bytes, blocks: int, page: int, rank: int, ranks: int) -> WorkerGeometry:
    region = Region(memory.ctypes.data, memory.nbytes)
    groups = []
    for index in range(PERIOD):
        places = [region.address + slot * blocks * page for slot in range(LAYERS // PERIOD)]
        make = _attention if index == PERIOD - 1 else _state
        layers = tuple(
            make(slot * PERIOD + index, place, region, (blocks, page, rank, ranks))
            for slot, place in enumerate(places)
        )
        groups.append(Group(index, "full" if make is _attention else "mamba", BLOCK_TOKENS, layers))
    return WorkerGeometry(Rank(tp=rank), blocks, (region,), tuple(groups))


def _attention(number: int, address: int, region: Region, shape: tuple[int, int, int, int]) -> Layer:
    blocks, page, rank, ranks = shape
    heads = share("KV heads", KV_HEADS, rank, ranks)
    tensor = LiveTensor(
        layer=f"model.layers.{number}.self_attn",
        address=address,
        shape=(blocks, heads.extent, BLOCK_TOKENS, 2 * HEAD_SIZE),
        strides=(page, BLOCK_TOKENS * TOKEN_BYTES, TOKEN_BYTES, 2),
        dtype="bfloat16",
        itemsize=2,
    )
    return attention_layer(
        tensor,
        (region,),
        dims=("block", "head", "token", "key+value"),
        blocks=Blocks(blocks, BLOCK_TOKENS),
        heads=heads,
        key_size=HEAD_SIZE,
        value_size=HEAD_SIZE,
    )


def _state(number: int, address: int, region: Region, shape: tuple[int, int, int, int]) -> Layer:
    blocks, page, rank, ranks = shape
    channels = (2 * KEY_HEADS + VALUE_HEADS) * STATE_SIZE // ranks
    return state_layer(
        LiveTensor(f"model.layers.{number}.linear_attn", address, (blocks, page), (page, 1), "int8", 1),
        (region,),
        state=StateShape(
            family="gdn",
            conv=((TAPS, channels), "bfloat16", 2),
            ssm=((VALUE_HEADS // ranks, STATE_SIZE, STATE_SIZE), "float32", 4),
            heads=VALUE_HEADS,
        ),
        rank=rank,
        ranks=ranks,
        block_stride=page,
    )


def _fields(
    cache: Cache, blocks: Mapping[int, BlockList], request: str
) -> Iterator[tuple[str, Values, Values]]:
    """Each field of each page of a request: what it is, the bytes that are there, what they must be."""
    geometry = cache.geometry
    for group in geometry.groups:
        for position, block in enumerate(blocks[group.index].ids.tolist()):
            number = blocks[group.index].first + position
            for layer in group.layers:
                start = layer.offset + block * layer.stride
                for field in layer.page.fields:
                    where = f"{layer.name}, {field.name}, block {number}"
                    yield where, _view(cache.memory, start, field), _values(f"{request}, {where}", field)


def _view(memory: Bytes, page: int, field: Field) -> Values:
    """A field of the page at byte ``page`` of the memory, as unsigned integers of its item size."""
    return np.ndarray(
        shape=tuple(axis.extent for axis in field.axes),
        dtype=f"u{field.itemsize}",
        buffer=memory.data,
        offset=page + field.offset,
        strides=tuple(axis.stride for axis in field.axes),
    )


def _values(key: str, field: Field) -> Values:
    """What the field of that key must hold: mixed bits of its elements' indices in the whole logical tensor."""
    extents = tuple(axis.extent for axis in field.axes)
    index = np.zeros(extents, np.uint64)
    for label, extent in field.shape:
        index *= np.uint64(extent)
        for position, axis in enumerate(field.axes):
            if axis.label == label:
                along = axis.start + np.arange(axis.extent, dtype=np.uint64) * np.uint64(axis.step)
                index += along.reshape([-1 if i == position else 1 for i in range(len(extents))])
    index += np.uint64(zlib.crc32(key.encode()) << 32)
    index *= np.uint64(0x9E3779B97F4A7C15)
    index ^= index >> np.uint64(29)
    index *= np.uint64(0xBF58476D1CE4E5B9)
    mixed: Values = (index >> np.uint64(64 - 8 * field.itemsize)).astype(f"u{field.itemsize}")
    return mixed
