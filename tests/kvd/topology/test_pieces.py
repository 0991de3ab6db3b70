"""A load in pieces is the same load, and what may be claimed of it after a miss."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from kvd.geometry.config import CacheOptions, Parallel
from kvd.geometry.model import EngineGeometry
from kvd.topology import pieces as slices
from kvd.topology.blocks import BlockList, window_start
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import coalesce, concatenate
from kvd.topology.pieces import cut, largest_prefix, piece
from kvd.topology.plan import Plan, plan_worker
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle
from tests.support.samples import engine_from_config

Case = tuple[EngineGeometry, EngineGeometry, int, oracle.Request]


def plan_of(case: Case) -> Plan:
    local, remote, rank, _ = case
    return plan_worker(local.workers[rank], local.workers, remote.workers)


@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(cases())
def test_all_pieces_together_copy_what_the_whole_load_does(case: Case) -> None:
    plan, asked = plan_of(case), case[3]
    ends = cut(plan, asked.local, tokens=asked.tokens, least=1)
    assert ends == sorted(set(ends))
    assert ends[-1] == asked.tokens
    assert len(ends) <= slices.MOST
    whole = compile_plan(plan, asked.local, asked.remote, tokens=asked.tokens)
    parts = [
        compile_plan(
            plan,
            piece(plan, asked.local, begin=begin, end=end, tokens=asked.tokens),
            asked.remote,
            tokens=asked.tokens,
        )
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    for position, found in whole.items():
        joined = coalesce(concatenate([part[position] for part in parts if position in part]))
        rows = coalesce(found)
        assert joined.local.tolist() == rows.local.tolist()
        assert joined.remote.tolist() == rows.remote.tolist()
        assert joined.length.tolist() == rows.length.tolist()


@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(cases())
def test_a_smaller_claim_is_one_that_can_be_read(case: Case) -> None:
    """It ends with its blocks, and of each windowed group all blocks of its own window are offered."""
    plan, asked = plan_of(case), case[3]
    for good in (asked.tokens // 2, asked.tokens):
        prefix = largest_prefix(plan, asked.remote, good=good, tokens=asked.tokens)
        assert 0 <= prefix < asked.tokens
        assert prefix <= good
        if not prefix:
            continue
        for read in plan.reads:
            assert read.kind != "mamba"
            assert prefix % plan.block_sizes[read.group] == 0
            if read.window is not None:
                first = asked.remote[read.remote_group].first * plan.remote_block_sizes[read.remote_group]
                assert first <= max(0, window_start(read.kind, read.window, prefix))


def test_a_small_load_is_one_piece() -> None:
    local, remote = (engine(name) for name in "dp")
    plan = plan_worker(local.workers[0], local.workers, remote.workers)
    blocks = {0: BlockList(0, np.arange(16, dtype=np.int64))}
    assert cut(plan, blocks, tokens=16 * 16) == [16 * 16]


def test_the_first_piece_is_half_as_long_as_the_others() -> None:
    local, remote = (engine(name) for name in "dp")
    plan = plan_worker(local.workers[0], local.workers, remote.workers)
    blocks = {0: BlockList(0, np.arange(28, dtype=np.int64))}
    (read,) = plan.reads
    a_quarter = 28 * read.bytes_per_block // 4
    assert cut(plan, blocks, tokens=28 * 16, least=a_quarter) == [4 * 16, 12 * 16, 20 * 16, 28 * 16]


def test_where_there_are_as_many_pieces_as_blocks_each_has_one() -> None:
    local, remote = (engine(name) for name in "dp")
    plan = plan_worker(local.workers[0], local.workers, remote.workers)
    for count in range(1, slices.MOST + 1):
        blocks = {0: BlockList(0, np.arange(count, dtype=np.int64))}
        ends = [16 * end for end in range(1, count + 1)]
        assert cut(plan, blocks, tokens=count * 16, least=1) == ends


def engine(name: str) -> EngineGeometry:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_size": 8,
    }
    return engine_from_config(config, Parallel(), CacheOptions(num_blocks=64), engine_id=name)
