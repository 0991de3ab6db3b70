"""The sums that benchmarks/gpu compares: equal wherever the bytes of the logical tensor are, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank

pytest.importorskip("torch")
from benchmarks.gpu.digest import Blocks, Sums, digest, span_of

HEADS, DIM, TOKENS = 4, 3, 40
CONTENT = np.random.default_rng(1).integers(-9999, 9999, (TOKENS, HEADS, DIM), np.int16)


def worker(
    block: int, ids: Sequence[int], heads: range = range(HEADS), *, head_first: bool = False
) -> tuple[WorkerGeometry, np.ndarray]:
    """A worker with one layer whose blocks ``ids`` hold `CONTENT`, and its memory."""
    blocks, count = max(ids) + 2, len(heads)
    shape = (blocks, count, block, DIM) if head_first else (blocks, block, count, DIM)
    memory = np.random.default_rng(2).integers(-99, 99, shape, np.int16)
    for number, at in enumerate(ids):
        part = CONTENT[number * block : (number + 1) * block, list(heads)]
        if head_first:
            memory[at, :, : len(part)] = part.transpose(1, 0, 2)
        else:
            memory[at, : len(part)] = part
    head, token = (memory.strides[1], memory.strides[2]) if head_first else memory.strides[2:0:-1]
    axes = (
        Axis("token", 0, block, 1, token),
        Axis("head", heads.start, count, 1, head),
        Axis("dim", 0, DIM, 1, 2),
    )
    field = Field("k", "int16", 2, 0, axes, (("head", HEADS), ("dim", DIM)))
    page = memory.strides[0]
    group = Group(0, "full", block, (Layer("layer", Page(page, (field,)), 0, 0, page),))
    return WorkerGeometry(Rank(), blocks, (Region(memory.ctypes.data, memory.nbytes),), (group,)), memory


def sums(geometry: WorkerGeometry, blocks: Blocks, tokens: int = TOKENS) -> Sums:
    return digest(geometry, {0: blocks}, {0: span_of(geometry.groups[0], blocks, tokens)})


def test_equal_content_has_equal_sums_whatever_the_blocks_and_the_order_of_axes() -> None:
    one, memory = worker(16, [3, 0, 5])
    other, others = worker(8, [7, 1, 2, 9, 4], head_first=True)
    assert sums(one, (0, [3, 0, 5])) == sums(other, (0, [7, 1, 2, 9, 4]))
    assert len(sums(one, (0, [3, 0, 5]))["layer k"]) == HEADS
    del memory, others


def test_a_worker_with_some_of_the_heads_has_their_sums() -> None:
    whole, memory = worker(16, [3, 0, 5])
    half, other = worker(16, [1, 2, 3], range(2, 4))
    assert sums(half, (0, [1, 2, 3]))["layer k"] == sums(whole, (0, [3, 0, 5]))["layer k"][2:]
    del memory, other


def test_tokens_outside_the_span_do_not_count() -> None:
    geometry, memory = worker(16, [3, 0, 5])
    before = sums(geometry, (0, [3, 0, 5]), 33)
    memory[5, 1:] = 0
    assert sums(geometry, (0, [3, 0, 5]), 33) == before
    part = digest(geometry, {0: (1, [0, 5])}, {0: (16, 33)})
    assert part == digest(geometry, {0: (0, [3, 0, 5])}, {0: (16, 33)})


@pytest.mark.parametrize("wrong", ["one byte", "two tokens swapped", "two blocks swapped"])
def test_a_wrong_byte_or_a_wrong_place_changes_a_sum(wrong: str) -> None:
    geometry, memory = worker(16, [3, 0, 5])
    before = sums(geometry, (0, [3, 0, 5]))
    if wrong == "one byte":
        memory[0, 4, 2, 1] += 1
    elif wrong == "two tokens swapped":
        memory[3, [1, 2]] = memory[3, [2, 1]]
    else:
        memory[[3, 0]] = memory[[0, 3]]
    assert sums(geometry, (0, [3, 0, 5])) != before


def test_blocks_that_do_not_hold_the_span_are_refused() -> None:
    geometry, memory = worker(16, [3, 0, 5])
    with pytest.raises(ValueError, match="do not hold tokens"):
        digest(geometry, {0: (1, [0, 5])}, {0: (0, 33)})
    del memory
