"""A second opinion on plans, byte by byte: real buffers whose every byte is the hash of what it logically is.

Nothing here uses the code under test but the data classes: element coordinates come from `numpy.indices`, copies are
slices of byte arrays, and every byte written is counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.model import EngineGeometry, Field, Group, Layer, WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import Descriptors
from kvd.topology.leftover import Runs, leftover
from kvd.topology.plan import plan_worker

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]
Blocks = Mapping[int, BlockList]

UNTOUCHED = 0xA5


@dataclass(frozen=True)
class Memory:
    """The regions of one worker as byte arrays."""

    worker: WorkerGeometry
    regions: tuple[Bytes, ...]

    def find(self, address: int, length: int) -> tuple[int, int]:
        for i, region in enumerate(self.worker.regions):
            if region.address <= address and address + length <= region.address + region.length:
                return i, address - region.address
        raise AssertionError(f"{length} bytes at {address:#x} are outside every region of {self.worker.rank}")


def memory(worker: WorkerGeometry) -> Memory:
    return Memory(worker, tuple(np.full(r.length, UNTOUCHED, np.uint8) for r in worker.regions))


def elements(fld: Field) -> tuple[dict[str, Int64], Int64]:
    """Logical coordinates by label and byte offset in the page of every element that the field holds."""
    grid = np.indices([a.extent for a in fld.axes]).reshape(len(fld.axes), -1).astype(np.int64)
    where: dict[str, Int64] = {}
    offset = np.full(grid.shape[1], fld.offset, np.int64)
    for axis, index in zip(fld.axes, grid, strict=True):
        where[axis.label] = where.get(axis.label, 0) + axis.start + index * axis.step
        offset += index * axis.stride
    return where, offset


def content(layer: str, fld: Field, where: Mapping[str, Int64], block: Int64) -> Bytes:
    """The bytes that elements at ``where`` must have: a hash of layer, field, block or token, and coordinates.

    Shape (blocks, elements, itemsize). ``block`` is the first absolute token of each block, or a state's ordinal.
    """
    seed = zlib.crc32(f"{layer}/{fld.name}".encode())
    value = np.full((len(block), len(next(iter(where.values())))), seed, np.uint64)
    coordinates = {label: np.broadcast_to(ix, value.shape) for label, ix in where.items()}
    if "token" in coordinates:
        coordinates["token"] = coordinates["token"] + block[:, None]
    else:
        coordinates["state number"] = np.broadcast_to(block[:, None], value.shape)
    for label in sorted(coordinates):
        value = _mix(
            value ^ _mix(coordinates[label].astype(np.uint64) + np.uint64(zlib.crc32(label.encode())))
        )
    return value[..., None].view(np.uint8)[..., : fld.itemsize]


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def positions(layer: Layer, fld: Field, offset: Int64, ids: Int64) -> Int64:
    """Byte positions in the layer's region, shape (blocks, elements, itemsize)."""
    at = layer.offset + ids[:, None] * layer.stride + offset
    return at[..., None] + np.arange(fld.itemsize)


def firsts(group: Group, blocks: BlockList) -> Int64:
    """What tells the blocks apart: the first token of each, or the ordinal of a state."""
    count = np.arange(len(blocks.ids), dtype=np.int64)
    return count if group.kind == "mamba" else (blocks.first + count) * group.block_size


def fill(target: Memory, blocks: Blocks) -> None:
    """Write every page of the given blocks."""
    for group in target.worker.groups:
        if group.index not in blocks:
            continue
        given = blocks[group.index]
        for layer in group.layers:
            for fld in layer.page.fields:
                where, offset = elements(fld)
                at = positions(layer, fld, offset, given.ids)
                target.regions[layer.region][at] = content(layer.name, fld, where, firsts(group, given))


@dataclass(frozen=True)
class Request:
    """Blocks of one request on both sides, how many of its tokens the remote side has and the local one had before."""

    local: Blocks
    remote: Blocks
    tokens: int
    computed: int = 0


def check(local: EngineGeometry, remote: EngineGeometry, rank: int, request: Request) -> int:
    """Plan, compile, zero, copy and look at every byte of worker number ``rank``. Returns how many were copied.

    What is here before is `UNTOUCHED` throughout, but for blocks in which the tokens end that are here already.
    """
    worker = local.workers[rank]
    plan = plan_worker(worker, local.workers, remote.workers)
    compiled = compile_plan(plan, request.local, request.remote, tokens=request.tokens)
    mine = memory(worker)
    fill(mine, {group.index: _hit(group, request) for group in worker.groups if group.index in request.local})
    written, zeroed = (tuple(np.zeros(len(r), np.int64) for r in mine.regions) for _ in range(2))
    clear(
        leftover(plan, request.local, request.remote, tokens=request.tokens, computed=request.computed),
        mine,
        zeroed,
    )
    for position, rows in compiled.items():
        theirs = memory(remote.workers[position])
        fill(theirs, request.remote)
        _copy(rows, mine, theirs, written)
    _compare(mine, written, request)
    no_leftover(mine, written, zeroed, request)
    return sum(rows.nbytes for rows in compiled.values())


def _copy(rows: Descriptors, mine: Memory, theirs: Memory, written: tuple[Int64, ...]) -> None:
    for here, there, length in zip(
        rows.local.tolist(), rows.remote.tolist(), rows.length.tolist(), strict=True
    ):
        assert length > 0
        region, at = mine.find(here, length)
        other, source = theirs.find(there, length)
        mine.regions[region][at : at + length] = theirs.regions[other][source : source + length]
        written[region][at : at + length] += 1


def _hit(group: Group, request: Request) -> BlockList:
    """The local block in which the tokens end that are here already: it was hit whole, so all of it is here."""
    given, computed = request.local[group.index], request.computed
    number = computed // group.block_size - given.first
    inside = group.kind != "mamba" and computed % group.block_size and 0 <= number < len(given.ids)
    return BlockList(given.first + number, given.ids[number : number + 1] if inside else given.ids[:0])


def clear(runs: Runs, mine: Memory, zeroed: tuple[Int64, ...]) -> None:
    """Zero them, and count how often each byte was."""
    for address, length in zip(runs.address.tolist(), runs.length.tolist(), strict=True):
        assert length > 0
        region, at = mine.find(address, length)
        mine.regions[region][at : at + length] = 0
        zeroed[region][at : at + length] += 1


def no_leftover(
    mine: Memory, written: tuple[Int64, ...], zeroed: tuple[Int64, ...], request: Request
) -> None:
    """Every byte of every field of the load's blocks was written or zeroed, and nothing else was zeroed.

    Of a block that was hit a byte may also be what it was; one of the tokens that were hit is never zero.
    """
    rest = tuple(count.copy() for count in zeroed)
    for group in mine.worker.groups:
        if group.index not in request.local:
            continue
        given, hit = request.local[group.index], _hit(group, request)
        for layer in group.layers:
            for fld in layer.page.fields:
                where, offset = elements(fld)
                at = positions(layer, fld, offset, given.ids)
                count, blank = written[layer.region][at], zeroed[layer.region][at]
                what = f"{mine.worker.rank} {layer.name} {fld.name}"
                here = np.broadcast_to(np.isin(given.ids, hit.ids)[:, None, None], at.shape)
                assert (blank <= 1).all(), f"{what}: a byte was zeroed twice"
                assert not (count & blank).any(), f"{what}: a byte was written and zeroed"
                assert (count | blank | here).all(), f"{what}: a byte is what somebody left there"
                if group.kind != "mamba":
                    known = firsts(group, given)[:, None] + where["token"] < request.computed
                    assert not blank[known].any(), f"{what}: a byte that was here was zeroed"
                assert not mine.regions[layer.region][at][blank == 1].any()
                rest[layer.region][at] = 0
    assert not any(count.any() for count in rest), (
        f"{mine.worker.rank}: bytes outside of every field were zeroed"
    )


def _compare(mine: Memory, written: tuple[Int64, ...], request: Request) -> None:
    """Needed bytes were written once and are right; bytes of later tokens in a needed block may be; no others are."""
    allowed = tuple(np.zeros(len(r), bool) for r in mine.regions)
    for group in mine.worker.groups:
        if group.index not in request.local:
            continue
        given = request.local[group.index]
        first = firsts(group, given)
        for layer in group.layers:
            for fld in layer.page.fields:
                where, offset = elements(fld)
                at = positions(layer, fld, offset, given.ids)
                right = content(layer.name, fld, where, first)
                count, value = written[layer.region][at], mine.regions[layer.region][at]
                needed = np.full(at.shape, True)
                if group.kind != "mamba":
                    token = first[:, None] + where["token"]
                    needed[...] = _needed(group, token, request.tokens)[..., None]
                what = f"{mine.worker.rank} {layer.name} {fld.name}"
                assert (count[needed] == 1).all(), (
                    f"{what}: a needed byte was written {set(count[needed])} times"
                )
                assert (value[needed] == right[needed]).all(), f"{what}: wrong bytes"
                assert (count[~needed] <= 1).all(), f"{what}: a byte was written more than once"
                some = ~needed & (count == 1)
                assert (value[some] == right[some]).all(), f"{what}: wrong bytes past the needed ones"
                allowed[layer.region][at] = True
    for count, mask in zip(written, allowed, strict=True):
        assert not count[~mask].any(), f"{mine.worker.rank}: bytes outside every needed field were written"


def _needed(group: Group, token: Int64, tokens: int) -> NDArray[np.bool_]:
    """Tokens that exist and that a query at the last token or later can attend to."""
    needed = token < tokens
    if group.window is not None and group.kind == "chunked":
        needed &= token // group.window >= (tokens - 1) // group.window
    elif group.window is not None:
        needed &= token > tokens - 1 - group.window
    return needed
