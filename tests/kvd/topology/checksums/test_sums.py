"""Checksums of KV: equal wherever the KV is, whoever holds it how; different as soon as anything of it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvd.geometry.model import Axis, EngineGeometry, Field, Layer, Page, WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.checksums.sums import (
    Classes,
    InMemory,
    TokenSpan,
    cells_of,
    classes_of,
    columns,
    layer_sums,
)
from tests.kvd.topology.test_oracle import _request
from tests.support import oracle
from tests.support import random_engines as engines
from tests.support.raising import raises
from tests.support.samples import engine, gated_delta_net, llama

M = 1 << 64
U = np.uint64


# --- the definition, element by element ---


def reference(fld: Field, page: NDArray[np.uint8], first: int, span: TokenSpan) -> dict[int, int]:
    """Sums of one field of one page by number of the cell, in plain integers."""
    label = next((x for x in ("head", "channel") if x in dict(fld.shape)), "")
    rest = [name for name, _ in fld.shape if name not in (label, "token")]
    shape = dict(fld.shape)
    total = shape.get(label, 1)
    wide = 1 if total <= 128 else total // gcd(total, 6720)
    each = 8 // fld.itemsize
    along = shape[rest[-1]] if rest else 1
    where, offsets = oracle.elements(fld)
    rows: dict[tuple[int, int], int] = {}
    for i, offset in enumerate(offsets.tolist()):
        at = {name: int(numbers[i]) for name, numbers in where.items()}
        bits = int.from_bytes(page[offset : offset + fld.itemsize].tobytes(), "little")
        word = 0
        for name in rest[:-1]:
            word = word * shape[name] + at[name]
        last = at[rest[-1]] if rest else 0
        word = word * -(-along // each) + last // each
        shifted = bits << 8 * fld.itemsize * (last % each)
        row = (at.get(label, 0), first + at.get("token", 0))
        rows[row] = (rows.get(row, 0) + shifted * odd(word, 0x5EED)) % M
    sums: dict[int, int] = {}
    for (place, token), whole in rows.items():
        cell = place // wide
        sums.setdefault(cell, 0)
        if span.begin <= token < span.end:
            mixed = (whole + odd(token, 0x70CE) * odd(place, 0xCE11)) % M
            mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 % M
            sums[cell] = (sums[cell] + (mixed ^ mixed >> 32)) % M
    return sums


@cache
def odd(number: int, salt: int) -> int:
    value = (number * 0x9E3779B97F4A7C15 + salt) % M
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % M
    value = (value ^ value >> 27) * 0x94D049BB133111EB % M
    return (value ^ value >> 31) | 1


# --- engines ---


@dataclass(frozen=True)
class Held:
    """A worker with a request's KV in its memory."""

    worker: WorkerGeometry
    regions: tuple[NDArray[np.uint8], ...]
    blocks: oracle.Blocks

    def layers(self) -> Iterator[tuple[Layer, int, BlockList]]:
        for group in self.worker.groups:
            for layer in group.layers:
                yield layer, 0 if group.kind == "mamba" else group.block_size, self.blocks[group.index]


def held(worker: WorkerGeometry, blocks: oracle.Blocks) -> Held:
    memory = oracle.memory(worker)
    oracle.fill(memory, blocks)
    return Held(worker, memory.regions, blocks)


def sums_of(holder: Held, layer: Layer, size: int, blocks: BlockList, span: TokenSpan) -> NDArray[np.uint64]:
    """Of a layer: (blocks, cells)."""
    count = np.arange(len(blocks.ids), dtype=np.int64)
    firsts = (blocks.first + count) * size if size else count
    summer = InMemory(holder.regions)
    return layer_sums(layer, summer, firsts=firsts, ids=blocks.ids, span=span)[:, 0]


Sums = dict[tuple[str, str, int], int]
"""By layer, field and cell."""


def engine_sums(geometry: EngineGeometry, blocks: oracle.Blocks, span: TokenSpan) -> Sums:
    """Of a whole engine: parts of cells are added up, replicas are counted once."""
    found: Sums = {}
    seen = set()
    for worker in geometry.workers:
        holder = held(worker, blocks)
        for layer, size, given_blocks in holder.layers():
            own = span if size else TokenSpan(0, 1 << 40)
            sums = sums_of(holder, layer, size, given_blocks, own).sum(axis=0)
            for fld, low, high in columns(layer.page):
                cells = cells_of(fld)
                where, _ = oracle.elements(fld)
                for i, value in enumerate(sums[low:high].tolist()):
                    cell = cells.first + i
                    inside = np.full(fld.elements, True)
                    if cells.label:
                        inside = where[cells.label] // cells.width == cell
                    held_here = tuple(
                        tuple(np.unique(numbers[inside]).tolist()) for _, numbers in sorted(where.items())
                    )
                    key = (layer.name, fld.name, cell)
                    if (key, held_here) not in seen:
                        seen.add((key, held_here))
                        found[key] = (found.get(key, 0) + value) % M
    return found


@st.composite
def pairs(draw: st.DrawFn) -> tuple[EngineGeometry, EngineGeometry, oracle.Request]:
    model = draw(engines.models())
    local, remote = (engines.engine(draw, name, model, 24) for name in ("local", "remote"))
    return local, remote, _request(draw, local, remote)


FEWER = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    print_blob=True,
)


@pytest.mark.timeout(600)
@FEWER
@given(pairs())
def test_two_engines_that_hold_the_same_kv_have_the_same_sums(
    pair: tuple[EngineGeometry, EngineGeometry, oracle.Request],
) -> None:
    local, remote, request = pair
    begin = max(
        blocks.first * group.block_size
        for geometry, held_blocks in ((local, request.local), (remote, request.remote))
        for group in geometry.workers[0].groups
        for blocks in [held_blocks[group.index]]
    )
    span = TokenSpan(begin, request.tokens)
    assert engine_sums(local, request.local, span) == engine_sums(remote, request.remote, span)


@pytest.mark.timeout(600)
@FEWER
@given(pairs())
def test_sums_are_those_of_the_definition(
    pair: tuple[EngineGeometry, EngineGeometry, oracle.Request],
) -> None:
    local, _, request = pair
    holder = held(local.workers[0], request.local)
    span = TokenSpan(request.tokens // 3, request.tokens)
    for layer, size, blocks in holder.layers():
        own = span if size else TokenSpan(0, 9)
        sums = sums_of(holder, layer, size, blocks, own)
        for number, block in enumerate(blocks.ids.tolist()):
            at = layer.offset + block * layer.stride
            page = holder.regions[layer.region][at:]
            first = (blocks.first + number) * size if size else number
            for fld, low, high in columns(layer.page):
                right = reference(fld, page, first, own)
                cells = cells_of(fld)
                assert list(right) == list(range(cells.first, cells.first + len(cells)))
                assert sums[number, low:high].tolist() == list(right.values()), f"{layer.name} {fld.name}"


# --- what differs shows ---


@pytest.fixture
def one() -> Held:
    """A worker of Llama with 4 blocks of 16 tokens, and of GDN with a state."""
    geometry = engine("e", ("full", 16, None, llama(("a",))), ("mamba", 16, None, gated_delta_net(("s",))))
    blocks = {0: BlockList(0, np.array([5, 2, 3, 9])), 1: BlockList(0, np.array([7]))}
    worker = geometry.workers[0]
    small = tuple(np.zeros(max(1, 32 * layer.stride), np.uint8) for _, layer in worker.layers.values())
    holder = Held(worker, small, blocks)
    dice = np.random.default_rng(1)
    for region in small:
        region[:] = dice.integers(0, 256, len(region), np.uint8)
    return holder


def all_sums(holder: Held, tokens: int = 60) -> list[list[int]]:
    return [
        sums_of(holder, layer, size, blocks, TokenSpan(0, tokens if size else 1)).sum(axis=0).tolist()
        for layer, size, blocks in holder.layers()
    ]


def page_of(holder: Held, name: str, block: int) -> NDArray[np.uint8]:
    _, layer = holder.worker.layers[name]
    at = layer.offset + block * layer.stride
    return holder.regions[layer.region][at : at + layer.page.size]


@pytest.mark.parametrize("name", ["a", "s"])
def test_any_flipped_bit_shows(one: Held, name: str) -> None:
    before = all_sums(one)
    page = page_of(one, name, 5 if name == "a" else 7)
    _, layer = one.worker.layers[name]
    dice = np.random.default_rng(2)
    for fld in layer.page.fields:
        _, offsets = oracle.elements(fld)
        for offset in dice.choice(offsets, 40):
            for bit in range(8 * fld.itemsize):
                at = int(offset) + bit // 8
                page[at] ^= 1 << bit % 8
                assert all_sums(one) != before, f"{fld.name} offset {offset} bit {bit}"
                page[at] ^= 1 << bit % 8
    assert all_sums(one) == before


def test_swapped_blocks_show(one: Held) -> None:
    before = all_sums(one)
    here, there = page_of(one, "a", 2), page_of(one, "a", 3)
    here[:], there[:] = there.copy(), here.copy()
    assert all_sums(one)[0] != before[0]


def test_swapped_heads_show_in_their_cells(one: Held) -> None:
    before = all_sums(one)
    page = page_of(one, "a", 2).reshape(8, 16, 512)
    page[[1, 4]] = page[[4, 1]]
    after = all_sums(one)
    assert [i for i in range(16) if after[0][i] != before[0][i]] == [1, 4, 9, 12]


def test_tokens_shifted_by_one_show(one: Held) -> None:
    before = all_sums(one)
    page = page_of(one, "a", 2).reshape(8, 16, 512)
    page[:] = np.roll(page, 1, axis=1)
    after = all_sums(one)
    assert not set(after[0]) & set(before[0])


def test_keys_taken_for_values_show(one: Held) -> None:
    before = all_sums(one)
    page = page_of(one, "a", 2).reshape(8, 16, 2, 256)
    page[:] = page[:, :, ::-1].copy()
    assert not set(all_sums(one)[0]) & set(before[0])


def test_tokens_beyond_the_prompt_do_not_count(one: Held) -> None:
    before = all_sums(one, 60)
    page_of(one, "a", 9).reshape(8, 16, 512)[:, 12:] = 0  # tokens 60 to 63
    assert all_sums(one, 60) == before
    assert all_sums(one, 61) != before


def test_what_stands_between_elements_does_not_count(one: Held) -> None:
    before = all_sums(one)
    _, layer = one.worker.layers["s"]
    page = page_of(one, "s", 7)
    page[max(f.end for f in layer.page.fields) :] ^= 0xFF
    assert all_sums(one) == before


# --- cells ---


def test_each_head_is_a_cell(one: Held) -> None:
    _, layer = one.worker.layers["a"]
    key = layer.page.by_name["k"]
    assert len(cells_of(key)) == 8


@pytest.mark.parametrize(
    ("total", "ranks", "cells"), [(2048, 8, 64), (6144, 3, 192), (5120, 5, 320), (96, 6, 96)]
)
def test_cells_of_many_channels_end_where_shares_do(total: int, ranks: int, cells: int) -> None:
    part = total // ranks
    numbers: list[int] = []
    for rank in range(ranks):
        axes = (Axis("channel", rank * part, part, 1, 2),)
        found = cells_of(Field("conv.x", "bfloat16", 2, 0, axes, (("channel", total),)))
        assert set(found.members) == {found.width}
        numbers += range(found.first, found.first + len(found))
    assert numbers == list(range(cells))


def test_elements_of_a_size_that_no_type_has_are_refused() -> None:
    fld = Field("k", "x", 3, 0, (Axis("dim", 0, 4, 1, 3),), (("dim", 4),))
    layer = Layer("l", Page(12, (fld,)), 0, 0, 12)
    with raises("KVD-TOPOLOGY-CHECKSUM", match="elements of 3 bytes"):
        layer_sums(
            layer,
            InMemory([np.zeros(12, np.uint8)]),
            firsts=np.zeros(1, np.int64),
            ids=np.zeros(1, np.int64),
            span=TokenSpan(0, 1),
        )


# --- classes of tokens ---


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("rank", range(4))
def test_a_context_parallel_rank_holds_one_class(run: int, rank: int) -> None:
    axes = (Axis("token", 0, 4, 4 * run, 64), Axis("token", rank * run, run, 1, 8))
    fld = Field("latent", "x", 2, 0, axes, (("token", 16 * run),))
    assert classes_of(fld, 16 * run) == (Classes(run, 4), rank)


def test_classes_are_made_up_of_finer_ones() -> None:
    fine = Classes(1, 1).finer(Classes(2, 2)).finer(Classes(1, 3))
    assert fine == Classes(1, 12)
    assert fine.parts(Classes(2, 2), 0) == [0, 1, 4, 5, 8, 9]
    assert fine.parts(Classes(1, 3), 1) == [1, 4, 7, 10]
    assert fine.parts(Classes(), 0) == list(range(12))
    assert Classes().parts(Classes(1, 2), 0) is None
    assert Classes(1, 2).parts(Classes(2, 1), 0) == [0, 1]
