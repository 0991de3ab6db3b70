"""Cutting a geometry down to fewer blocks, and the bytes that are compared: on all presets, through real plans."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvctl.bench.cases import blocks_needed, requests, whole_tokens
from kvctl.bench.memory import place, size_of, with_blocks
from kvctl.bench.pattern import clear, fill, first_difference
from kvctl.commands.measuring.benchmark import FRAGMENTATIONS, RARER
from kvctl.engines.models import preset_names
from kvctl.engines.sources import planned
from kvd.geometry.check import check_worker
from kvd.topology.compile import compile_plan
from kvd.topology.plan import plan_worker

PAIRS = (
    ("llama-3.1-8b", "tp=4", "tp=8"),
    ("llama-3.1-8b", "tp=8,block_size=32", "tp=8,block_size=16"),
    ("llama-3.1-8b", "tp=8,layout=HND", "tp=4,layout=BLNHC"),
    ("deepseek-v3", "tp=2", "tp=1"),
    ("gpt-oss-120b", "tp=8", "tp=8"),
    ("qwen3.5-35b-a3b", "tp=2", "tp=4"),
)


@pytest.mark.parametrize("name", preset_names())
def test_a_cut_down_worker_is_consistent_and_as_much_smaller(name: str) -> None:
    worker = planned(name, "").workers[0]
    cut = with_blocks(worker, worker.num_blocks // 8)
    check_worker(cut)
    assert cut.num_blocks == worker.num_blocks // 8
    assert size_of(cut) * 8 == pytest.approx(size_of(worker), rel=0.01)
    assert [layer.page for group in cut.groups for layer in group.layers] == [
        layer.page for group in worker.groups for layer in group.layers
    ]


def test_cutting_to_more_blocks_than_there_are_changes_nothing_but_unused_bytes() -> None:
    worker = planned("llama-3.1-8b", "").workers[0]
    assert with_blocks(worker, 10 * worker.num_blocks).num_blocks == worker.num_blocks


@pytest.mark.parametrize(("model", "local", "remote"), PAIRS)
@pytest.mark.parametrize("fragmentation", [*FRAGMENTATIONS, *RARER])
def test_what_a_plan_moves_is_found_right_and_one_wrong_byte_is_found(
    model: str, local: str, remote: str, fragmentation: str
) -> None:
    engines = planned(model, local), planned(model, remote)
    tokens = whole_tokens(engines, 64)
    counts = [blocks_needed(engine.workers[0], tokens, 2) + 3 for engine in engines]
    cut = [
        [with_blocks(worker, count) for worker in engine.workers]
        for engine, count in zip(engines, counts, strict=True)
    ]
    reader = place(cut[0][0])
    plan = plan_worker(reader.geometry, cut[0], cut[1])
    memories = {at: place(cut[1][at]) for at in plan.sources}
    sources = [memories[at].geometry if at in memories else worker for at, worker in enumerate(cut[1])]
    plan = plan_worker(reader.geometry, cut[0], sources)
    _, second = requests(reader.geometry, sources[plan.sources[0]], tokens, 2, fragmentation)
    for memory in memories.values():
        fill(memory, second.source, "key")
    assert first_difference(reader, second.reader, "key", tokens)
    for rows in compile_plan(plan, second.reader, second.source, tokens=tokens).values():
        for here, there, length in zip(rows.local, rows.remote, rows.length, strict=True):
            ctypes.memmove(int(here), int(there), int(length))
    assert first_difference(reader, second.reader, "key", tokens) == ""
    assert first_difference(reader, second.reader, "another key", tokens)
    group = reader.geometry.groups[-1]
    layer, block = group.layers[-1], int(second.reader[group.index].ids[-1])
    reader.regions[layer.region][layer.offset + block * layer.stride + layer.page.fields[0].offset] ^= 1
    difference = first_difference(reader, second.reader, "key", tokens)
    assert difference.startswith(f"{layer.name}, ")
    clear(reader, second.reader)
    assert not any(region.any() for region in reader.regions)


@pytest.mark.parametrize("fragmentation", [*FRAGMENTATIONS, *RARER])
def test_requests_have_blocks_of_their_own_that_lie_as_asked(fragmentation: str) -> None:
    worker = with_blocks(planned("llama-3.1-8b", "").workers[0], 100)
    found = requests(worker, worker, 16 * 24, 3, fragmentation)
    ids = np.concatenate([one.reader[0].ids for one in found])
    assert len(set(ids.tolist())) == 72
    assert 0 not in ids
    breaks = np.count_nonzero(np.diff(found[0].reader[0].ids) != 1)
    assert {
        "contiguous": breaks == 0,
        "freed": (np.diff(found[0].reader[0].ids) == -1).all(),
        "runs-of-4": 3 <= breaks <= 5,
        "random": breaks > 15,
    }[fragmentation]


def test_too_few_blocks_are_refused_with_both_numbers() -> None:
    worker = with_blocks(planned("llama-3.1-8b", "").workers[0], 10)
    with pytest.raises(ValueError, match="24 blocks are needed and 9 are there"):
        requests(worker, worker, 16 * 24, 1, "contiguous")
