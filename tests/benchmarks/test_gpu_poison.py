"""Poisoned KV memory in benchmarks/gpu: what is filled, what counts as left, how answers are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank

pytest.importorskip("torch")
import torch

from benchmarks.gpu import in_worker, poisoned_tables
from benchmarks.gpu.fleet import SIZES, Fleet, Pair, PairSpec
from benchmarks.gpu.poison import BYTE, fill, leftover, watch_choices
from benchmarks.gpu.poisoned import clarity, pairs

HEADS, DIM, BLOCK, BLOCKS = 2, 3, 8, 6
IDS = (3, 1)
TOKENS = 11
"""Of a request: 8 in block 3, 3 in block 1."""


def worker() -> tuple[WorkerGeometry, np.ndarray]:
    """A worker with a layer of tokens, (block, head, token, dim), and its memory."""
    memory = np.zeros((BLOCKS, HEADS, BLOCK, DIM), np.int16)
    axes = (
        Axis("token", 0, BLOCK, 1, memory.strides[2]),
        Axis("head", 0, HEADS, 1, memory.strides[1]),
        Axis("dim", 0, DIM, 1, 2),
    )
    field = Field("k", "int16", 2, 0, axes, (("head", HEADS), ("dim", DIM)))
    page = memory.strides[0]
    group = Group(0, "full", BLOCK, (Layer("layer", Page(page, (field,)), 0, 0, page),))
    return WorkerGeometry(Rank(), BLOCKS, (Region(memory.ctypes.data, memory.nbytes),), (group,)), memory


def left(geometry: WorkerGeometry) -> tuple[int, int]:
    """Elements of the request that hold the pattern: of its tokens, and of later ones."""
    found = leftover(geometry, {0: (0, IDS)}, {0: (0, TOKENS)})
    return found["within"], found["beyond"]


def test_all_memory_is_filled_but_the_block_that_no_request_has() -> None:
    geometry, memory = worker()
    assert fill(geometry, BYTE) == memory.nbytes
    assert not memory[0].any()
    assert (memory[1:] == -1).all()


def test_what_a_load_did_not_write_is_counted_within_and_beyond_its_tokens() -> None:
    geometry, memory = worker()
    fill(geometry, BYTE)
    assert left(geometry) == (TOKENS * HEADS * DIM, (2 * BLOCK - TOKENS) * HEADS * DIM)
    memory[3] = 5
    memory[1, :, :3] = 5
    assert left(geometry) == (0, 5 * HEADS * DIM)
    memory[1, :, 3:] = 0
    assert left(geometry) == (0, 0)


def test_of_each_step_the_best_token_its_lead_and_what_is_no_number_are_noted() -> None:
    steps = iter([torch.tensor([[1.0, 4.0, 2.5]]), None, torch.tensor([[0.0, 9.0], [float("nan"), 1.0]])])
    model = SimpleNamespace(compute_logits=lambda: next(steps))
    handed_over = watch_choices(model)
    for _ in range(3):
        model.compute_logits()
    (clear, none_of_it) = handed_over()
    assert clear == (1, 1.5, False)
    assert none_of_it[2]
    assert handed_over() == []


def test_clarity_is_of_the_step_where_answers_part_and_noise_of_those_before() -> None:
    some, others = [(7, 2.0, False), (8, 0.25, False)], [(7, 1.5, False), (9, 0.125, False)]
    assert clarity(some, others, 1) == {"noise": 0.5, "gaps": [0.25, 0.125]}
    assert clarity(some, some, None) == {"noise": 0.0}


def test_the_other_direction_swaps_everything_that_has_two_sides() -> None:
    spec = PairSpec(kind="dense", way="nixl", blocks=(16, 64), gpus=("0", "0,1"), tp=(1, 2), turns=True)
    prefill, decode = cast("Any", object()), cast("Any", object())
    hosts: Any = ("here", "there")
    pair = Pair(spec, prefill, decode, hosts, ("p", "d"), joined=True)
    turned = pair.turned()
    assert (turned.prefill, turned.decode) == (decode, prefill)
    assert turned.hosts == hosts[::-1]
    assert turned.ids == ("d", "p")
    assert turned.joined is None
    assert turned.spec.name == "dense-nixl-b64to16-tp2to1"
    assert turned.spec.gpus == ("0,1", "0")
    assert turned.turned().spec == spec


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_pair_has_blocks_of_unequal_sizes_and_can_turn(device: str) -> None:
    fleet = Fleet(device, SIZES[device], Path(), Path(), cast("Any", None), 2, cast("Any", None))
    made = [spec for kind in ("gdn", "mamba2", "dense") for spec in pairs(fleet, kind)]
    assert {spec.way for spec in made} == {"direct", "nixl"}
    assert len({spec.name for spec in made}) == len(made)
    for spec in made:
        assert spec.turns
        assert spec.blocks is not None
        assert spec.blocks[0] != spec.blocks[1]


def line(*, zeroing: bool, beyond: int, parts: int | None, **more: Any) -> dict[str, Any]:
    """A result of one load."""
    against = {"parts": parts, "noise": 0.25} | ({"gaps": [0.125, 0.0625]} if parts is not None else {})
    return {
        "what": "poisoned", "run": 0, "kind": "gdn", "way": "nixl", "mode": "pull", "joined": False, "tp": [1, 2],
        "blocks": [144, 288], "tokens": 20, "sums": 12, "equal": True, "zeroing": zeroing, "switched": True,
        "within": 0, "beyond": beyond, "elements": 1000, "nan": False, "control": {"nan": False}, "error": "",
        "answers": {"decoder": against, "prefiller": {"parts": None}, "alone": {"parts": parts}},
        **more,
    }  # fmt: skip


def cells(text: str, row: int = 0) -> Sequence[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in text.splitlines()[2 + row].strip("|").split("|")]


def test_tables_tell_loads_with_zeroing_from_those_without() -> None:
    lines = [line(zeroing=True, beyond=0, parts=3), line(zeroing=False, beyond=210, parts=None)]
    found = cells(poisoned_tables.poisoned(lines))
    assert found[4:6] == ["1 → 2", "144 → 288"]
    assert found[8:14] == ["equal", "0", "21.0 %", "0 of 1", "0 of 1", "0 of 1"]
    assert cells(poisoned_tables.parted(lines))[2:] == ["1", "0", "1", "1", "0", "≤ 0.125", "≤ 0.25"]


def test_engines_alone_are_compared_by_how_many_workers_they_have() -> None:
    same = {"what": "alone", "run": 0, "kind": "gdn", "tokens": 20, "block": 144, "error": ""}
    lines = [
        same | {"tp": 1, "answer": [5, 6], "choices": [[5, 1.0, False], [6, 0.5, False]]},
        same | {"tp": 2, "answer": [5, 7], "choices": [[5, 0.75, False], [7, 0.25, False]]},
        same | {"tp": 1, "answer": [5, 6], "choices": [[5, 1.0, False], [6, 0.5, False]]},
    ]
    text = poisoned_tables.alone(lines)
    assert cells(text)[1:] == ["1 and 1, one block", "1", "1", "not measured", "≤ 0"]
    assert cells(text, 1)[1:] == ["1 and 2", "2", "0", "≤ 0.5", "≤ 0.25"]


def test_a_worker_says_after_a_load_what_is_left_once_it_was_poisoned() -> None:
    geometry, memory = worker()
    order = SimpleNamespace(request_id="r", tokens=TOKENS, groups={0: (0, IDS)})
    assert in_worker._load(geometry, order, sums=False)["leftover"] == {}
    fill(geometry, BYTE)
    assert in_worker._load(geometry, order, sums=False, poisoned=True)["leftover"]["within"]
    del memory
