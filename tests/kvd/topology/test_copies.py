"""Selection of a grid name the very bytes that coalesced descriptors do, and are chosen where those stay many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from kvd.geometry.config import CacheOptions, Parallel
from kvd.geometry.model import EngineGeometry
from kvd.topology import copies as request
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.copies import Copies, compile_blocks, compile_request
from kvd.topology.descriptors import Descriptors, coalesce
from kvd.topology.grid import BlockSelection, Selection
from kvd.topology.plan import Plan, plan_worker
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle
from tests.support.raising import raises
from tests.support.samples import engine_from_config


@contextmanager
def eager() -> Iterator[None]:
    """Selection wherever a grid allows them at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "FEW", 0)
        patch.setattr(request, "LEAST_RUN", 1 << 40)
        yield


def joined(rows: Descriptors) -> list[list[int]]:
    rows = coalesce(rows)
    return [rows.local.tolist(), rows.remote.tolist(), rows.length.tolist()]


@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(cases())
def test_picks_copy_what_descriptors_copy(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request],
) -> None:
    local, remote, rank, asked = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    rows = compile_plan(plan, asked.local, asked.remote, tokens=asked.tokens)
    with eager():
        found = compile_request(plan, asked.local, asked.remote, tokens=asked.tokens)
    assert found.keys() == rows.keys()
    for position, copies in found.items():
        assert not len(copies.descriptors)
        assert copies.selection is not None
        assert joined(copies.selection.descriptors()) == joined(rows[position])
        assert copies.nbytes == rows[position].nbytes == copies.selection.descriptors().nbytes
        assert copies.runs == len(rows[position])


@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(cases())
def test_blocks_copy_what_descriptors_copy(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request],
) -> None:
    local, remote, rank, asked = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    rows = compile_plan(plan, asked.local, asked.remote, tokens=asked.tokens)
    found = compile_blocks(plan, asked.local, asked.remote, tokens=asked.tokens)
    assert found.keys() == rows.keys()
    for position, copies in found.items():
        selection = copies.selection
        assert isinstance(selection, BlockSelection)
        assert joined(selection.descriptors()) == joined(rows[position])
        assert copies.nbytes == rows[position].nbytes
        assert copies.runs == len(rows[position])
        cells = Selection(selection.grid, selection.local, selection.remote, selection.nbytes)
        assert joined(cells.descriptors()) == joined(rows[position])
        assert len(selection) == len(cells)


LAYERS, BLOCKS = 8, 256
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@pytest.fixture(scope="module")
def dense() -> Plan:
    config = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_size": 4,
    }
    options = CacheOptions(num_blocks=BLOCKS, layout="HND")
    local, remote = (engine_from_config(config, Parallel(), options, engine_id=name) for name in "dp")
    return plan_worker(local.workers[0], local.workers, remote.workers)


def compiled(plan: Plan, ids: Ids) -> Copies:
    blocks = BlockList(0, ids)
    return compile_request(plan, {0: blocks}, {0: blocks}, tokens=len(ids) * plan.block_sizes[0])[0]


def in_runs(length: int) -> Ids:
    starts = np.random.default_rng(3).permutation(BLOCKS // (2 * length)) * 2 * length
    return (starts[:, None] + np.arange(length)).ravel()


@pytest.mark.parametrize(("length", "picked"), [(1, True), (2, True), (4, True), (8, False), (128, False)])
def test_scattered_blocks_are_picked_and_runs_are_addressed(
    dense: Plan, length: int, picked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "FEW", 1)
    copies = compiled(dense, in_runs(length))
    assert (copies.selection is not None) is picked
    assert bool(len(copies.descriptors)) is not picked
    assert copies.runs == LAYERS * BLOCKS // (2 * length)


def test_few_cells_are_picked_whatever_their_runs(dense: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "FEW", LAYERS * 100)
    few = compiled(dense, np.arange(100))
    assert few.selection is not None
    assert (len(few.selection), few.runs) == (LAYERS * 100, LAYERS)
    assert compiled(dense, np.arange(101)).selection is None


def test_descending_blocks_are_put_in_order_for_a_backend_that_joins(dense: Plan) -> None:
    with eager():
        selection = compiled(dense, np.sort(in_runs(4))[::-1].copy()).selection
    assert selection is not None
    assert (np.diff(selection.local[: BLOCKS // 2]) > 0).all()


def test_a_grid_is_one_object_for_all_requests(dense: Plan) -> None:
    first, second = (compiled(dense, in_runs(1)[part]).selection for part in (slice(64), slice(64, 128)))
    assert first is not None
    assert second is not None
    assert first.grid is second.grid


def test_cells_beyond_32_bits_are_addressed(dense: Plan) -> None:
    wide = replace(dense, local_blocks=1 << 29)
    assert not wide.grids[0][0].numbered
    assert compiled(wide, in_runs(1)).selection is None


def test_blocks_stay_in_the_order_that_they_were_given_in(dense: Plan) -> None:
    ids = in_runs(1)
    selection = blocks_of(dense, ids).selection
    assert isinstance(selection, BlockSelection)
    (part,) = selection.parts
    assert (part.first_row, part.rows) == (0, LAYERS)
    assert part.mine.tolist() == part.theirs.tolist() == ids.tolist()
    assert part.mine.dtype == part.theirs.dtype == np.int32


@pytest.mark.parametrize(
    ("local", "remote", "says"),
    [
        ([3, 5, 3], [1, 2, 4], "block id 3 is given 2 times"),
        ([3, 5, BLOCKS], [1, 2, 4], f"block ids 3..{BLOCKS} and only {BLOCKS} blocks"),
        ([3, -1, 7], [1, 2, 4], f"block ids -1..7 and only {BLOCKS} blocks"),
        ([3, 5, 7], [1, -2, 4], f"block ids -2..4 and only {BLOCKS} blocks"),
        ([3, 5, 7], [1, 1 << 33, 4], f"block ids 1..{1 << 33} and only {BLOCKS} blocks"),
    ],
)
def test_blocks_that_there_are_not_are_refused(
    dense: Plan, local: list[int], remote: list[int], says: str
) -> None:
    mine, theirs = ({0: BlockList(0, np.array(ids, np.int64))} for ids in (local, remote))
    with raises("KVD-TOPOLOGY-BLOCKS", match=says):
        compile_blocks(dense, mine, theirs, tokens=len(local) * dense.block_sizes[0])


def test_a_grid_that_32_bits_do_not_number_is_compiled_as_for_any_lane(dense: Plan) -> None:
    wide = replace(dense, local_blocks=1 << 31, remote_blocks=(1 << 31,))
    assert blocks_of(wide, in_runs(1)).selection is None


def blocks_of(plan: Plan, ids: Ids) -> Copies:
    blocks = {0: BlockList(0, ids)}
    return compile_blocks(plan, blocks, blocks, tokens=len(ids) * plan.block_sizes[0])[0]
