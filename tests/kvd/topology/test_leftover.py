"""What a load leaves of its blocks, in figures; that it is all and no more of it the oracle says (`test_oracle`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from kvd.geometry.model import EngineGeometry
from kvd.topology.blocks import BlockList, window_start
from kvd.topology.leftover import Runs, leftover
from kvd.topology.plan import Plan, plan_worker
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle, samples

TOKEN = 8 * 256 * 2
"""Bytes of a token in a layer: 8 heads, keys and values of 128 elements, bfloat16."""


def ids(*numbers: int, first: int = 0) -> dict[int, BlockList]:
    return {0: BlockList(first, np.array(numbers, np.int64))}


def dense(name: str, block: int, *, layers: int = 2, layout: str = "NHD", tp: int = 1) -> EngineGeometry:
    names = tuple(f"l{n}" for n in range(layers))
    return samples.engine(
        name, ("full", block, None, samples.llama(names, block=block, layout=layout)), tp=tp
    )


def windowed(name: str, block: int, window: int) -> EngineGeometry:
    layers = samples.llama(("a",), block=block, layout="NHD")
    return samples.engine(name, ("sliding_window", block, window, layers))


def plan_of(local: EngineGeometry, remote: EngineGeometry) -> Plan:
    return plan_worker(local.workers[0], local.workers, remote.workers)


def tokens_of(runs: Runs, layer: int = 0) -> set[int]:
    """Slots of a layer, counted through its blocks, that lie in ``runs``; one slot stands behind the other."""
    base = (1 + layer) << 32
    found: set[int] = set()
    for address, length in zip((runs.address - base).tolist(), runs.length.tolist(), strict=True):
        if 0 <= address < samples.REGION:
            assert address % TOKEN == length % TOKEN == 0
            found |= set(range(address // TOKEN, (address + length) // TOKEN))
    return found


def slots(block: int, size: int, which: Iterable[int]) -> set[int]:
    return {block * size + slot for slot in which}


def test_of_64_slots_32_stay_where_20_tokens_come_from_blocks_of_16() -> None:
    plan = plan_of(dense("d", 64), dense("p", 16))
    runs = leftover(plan, ids(5), ids(1, 2), tokens=20)
    assert tokens_of(runs) == tokens_of(runs, layer=1) == slots(5, 64, range(32, 64))
    assert runs.nbytes == 2 * 32 * TOKEN
    assert len(runs) == 2, "what lies together is one run"


@pytest.mark.parametrize(("here", "there"), [(16, 16), (16, 64), (32, 128)])
def test_blocks_that_are_not_larger_than_the_remote_ones_are_written_whole(here: int, there: int) -> None:
    plan = plan_of(dense("d", here), dense("p", there))
    assert not len(leftover(plan, ids(5, 3), ids(1), tokens=here + 4))


def test_blocks_that_end_with_the_tokens_leave_nothing() -> None:
    plan = plan_of(dense("d", 64), dense("p", 16))
    assert not len(leftover(plan, ids(5, 6), ids(*range(8)), tokens=128))
    assert not len(leftover(plan, ids(5, 6), ids(*range(8)), tokens=113)), (
        "the last remote block begins at 112"
    )
    assert tokens_of(leftover(plan, ids(5, 6), ids(*range(7)), tokens=112)) == slots(6, 64, range(48, 64))


def test_sizes_that_do_not_divide_each_other() -> None:
    plan = plan_of(dense("d", 24), dense("p", 16))
    # Remote blocks end at 16, 32, 48, ...: of local block 1 (24 to 48) all is written, of block 2 up to 64.
    assert tokens_of(leftover(plan, ids(3, 7, 2), ids(*range(4)), tokens=50)) == slots(2, 24, range(16, 24))


def test_a_worker_of_several_zeroes_its_own_heads() -> None:
    plan = plan_of(dense("d", 64, tp=2), dense("p", 16, tp=4))
    assert leftover(plan, ids(5), ids(1, 2), tokens=20).nbytes == 2 * 32 * TOKEN // 2


def test_heads_that_stand_outside_of_tokens_are_a_run_each() -> None:
    plan = plan_of(dense("d", 64, layout="HND"), dense("p", 16, layout="HND"))
    runs = leftover(plan, ids(5), ids(1, 2), tokens=20)
    assert (len(runs), runs.nbytes) == (2 * 8, 2 * 32 * TOKEN)


def test_what_the_remote_side_let_go_of_before_the_window() -> None:
    plan = plan_of(windowed("d", 64, 40), windowed("p", 16, 40))
    # The window of 100 tokens begins at 60; remote block 3 (48 to 64) is the first that is kept.
    runs = leftover(plan, ids(5, 6), ids(*range(4), first=3), tokens=100)
    assert tokens_of(runs) == slots(5, 64, range(48)) | slots(6, 64, range(48, 64))


def test_what_it_still_has_from_before_the_window_is_copied() -> None:
    plan = plan_of(windowed("d", 64, 40), windowed("p", 16, 40))
    assert tokens_of(leftover(plan, ids(5), ids(*range(4)), tokens=64)) == set()
    assert tokens_of(leftover(plan, ids(5), ids(*range(3), first=1), tokens=64)) == slots(5, 64, range(16))


def test_a_block_that_was_hit_keeps_what_it_holds() -> None:
    """20 tokens are here already, in a block that somebody else may use; what was not known of it is zeroed."""
    plan = plan_of(windowed("d", 64, 4), windowed("p", 16, 4))
    runs = leftover(plan, ids(5), ids(1, first=3), tokens=64, computed=20)
    assert tokens_of(runs) == slots(5, 64, range(32, 48)), "16 to 32 holds some of the 20"


def test_a_window_that_lacks_what_other_groups_have_is_zeroed_as_if_nothing_were_here() -> None:
    plan = plan_of(windowed("d", 64, 40), windowed("p", 16, 40))
    runs = leftover(plan, ids(5, 6), ids(*range(4), first=3), tokens=100, computed=64)
    assert tokens_of(runs) == slots(5, 64, range(48)) | slots(6, 64, range(48, 64))


def test_states_are_copied_whole() -> None:
    d, p = (samples.engine(name, ("mamba", 16, None, samples.gated_delta_net(("m",)))) for name in "dp")
    assert not len(leftover(plan_of(d, p), ids(3), ids(4), tokens=100))


def test_layers_that_share_their_memory_are_zeroed_once() -> None:
    d, p = dense("d", 64), dense("p", 16)
    (worker,) = d.workers
    (group,) = worker.groups
    first, second = group.layers
    twin = replace(second, region=first.region, offset=first.offset)
    shared = replace(d, workers=(replace(worker, groups=(replace(group, layers=(first, twin)),)),))
    assert leftover(plan_of(shared, p), ids(5), ids(1, 2), tokens=20).nbytes == 32 * TOKEN


def test_blocks_that_no_token_reaches_are_zeroed_whole() -> None:
    plan = plan_of(dense("d", 16), dense("p", 16))
    assert tokens_of(leftover(plan, ids(5, 6), ids(1, 2), tokens=16)) == slots(6, 16, range(16))


def in_window(geometry: EngineGeometry, blocks: dict[int, BlockList], tokens: int) -> dict[int, BlockList]:
    """The blocks that a prefiller writes of: without those before the window."""
    kept = {}
    for group in geometry.workers[0].groups:
        given, low = blocks[group.index], 0
        if group.window and group.kind != "mamba":
            low = max(0, window_start(group.kind, group.window, tokens) // group.block_size - given.first)
        kept[group.index] = BlockList(given.first + low, given.ids[low:])
    return kept


@settings(THOROUGH, max_examples=min(300, THOROUGH.max_examples))
@given(cases(keeps=True))
def test_of_a_push_it_is_known_before_the_prefiller_names_its_blocks(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request],
) -> None:
    local, remote, rank, request = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    written = in_window(remote, dict(request.remote), request.tokens)
    numbers = {"tokens": request.tokens, "computed": request.computed}
    known, told = (leftover(plan, request.local, blocks, **numbers) for blocks in (None, written))
    assert (known.address.tolist(), known.length.tolist()) == (told.address.tolist(), told.length.tolist())


def test_where_nothing_is_left_it_costs_next_to_nothing() -> None:
    """Microseconds, whatever the prompt's length; so generous a limit is for machines that are busy."""
    plan = plan_of(dense("d", 16, layers=32), dense("p", 16, layers=32))
    blocks = {0: BlockList(0, np.arange(6250, dtype=np.int64))}
    spent = []
    for _ in range(200):
        began = time.perf_counter()
        leftover(plan, blocks, blocks, tokens=99_990)
        spent.append(time.perf_counter() - began)
    assert min(spent) < 100e-6
