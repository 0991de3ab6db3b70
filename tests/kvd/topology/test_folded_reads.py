"""What is worked out once for reads that are alike is what each of them gives alone: reads, costs and findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.engines.sources import planned
from kvd.geometry.model import EngineGeometry
from kvd.topology.compat import compare
from kvd.topology.compile import compile_plan
from kvd.topology.cost import RequestCost, blocks_of, request_cost
from kvd.topology.describe import plan_engine, summarize_reads
from kvd.topology.findings import find
from kvd.topology.pairing import pair_blocks
from kvd.topology.plan import Plan, plan_worker
from tests.support import random_engines as engines

FAIR = settings(
    max_examples=60,
    deadline=None,  # the machine that runs this is shared
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    print_blob=True,
)
PAIRS = (
    ("qwen3-32b", "tp=24", "tp=40"),
    ("qwen3-32b", "tp=40,block_size=48,layout=NHD", "tp=24,pp=3,layout=HND"),
    ("deepseek-v3", "tp=6", "tp=10,dcp=5"),
    ("qwen3-next-80b-a3b", "tp=8", "tp=2,pp=2"),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[EngineGeometry, EngineGeometry]:
    """Replicated and split heads, latents, states, windows, context parallelism, stages, blocks of unlike sizes."""
    model = draw(engines.models())
    local, remote = (engines.engine(draw, name, model, 24) for name in ("local", "remote"))
    return local, remote


@FAIR
@given(pairs(), st.integers(1, 200))
def test_of_random_engines(pair: tuple[EngineGeometry, EngineGeometry], tokens: int) -> None:
    folded_is_unfolded(*pair, tokens)


@pytest.mark.parametrize(("model", "local", "remote"), PAIRS)
def test_of_models_that_are_served(model: str, local: str, remote: str) -> None:
    folded_is_unfolded(planned(model, local), planned(model, remote), 1000)


def folded_is_unfolded(local: EngineGeometry, remote: EngineGeometry, tokens: int) -> None:
    """Plans that share nothing, one by one, give the same rows, summaries, cost and findings."""
    together = plan_engine(local, remote)
    alone = [plan_worker(local.by_rank[plan.local_rank], local.workers, remote.workers) for plan in together]
    assert [rows(plan) for plan in together] == [rows(plan) for plan in alone]
    assert summarize_reads(together) == tuple(line for plan in alone for line in summarize_reads([plan]))
    cost = request_cost(local, remote, together, tokens=tokens)
    assert astuple(cost) == astuple(expanded(local, remote, alone, tokens))
    factors = compare(local, remote, together)
    assert factors == compare(local, remote, alone)
    assert find(local, remote, factors, together, cost) == find(local, remote, factors, alone, cost)


def rows(plan: Plan) -> list[object]:
    """Everything of the plan's reads, the bytes' addresses among it."""
    return [
        (
            read.remote, read.group, read.remote_group, read.kind, read.phase, read.layers, read.heads, read.window,
            read.local_stride, read.remote_stride, read.layer_bytes, read.layer_segments, read.bytes_per_block,
            read.filling[1], *(column.tolist() for column in (read.rows.local, read.rows.remote, read.rows.length)),
        )
        for read in plan.reads
    ]  # fmt: skip


def expanded(
    local: EngineGeometry, remote: EngineGeometry, plans: Sequence[Plan], tokens: int
) -> RequestCost:
    """The cost of a request from the copies of it themselves, worker by worker, as a load makes them."""
    mine, theirs = blocks_of(local, tokens), blocks_of(remote, tokens)
    room = 1 + max(int(blocks.ids.max(initial=0)) for blocks in (*mine.values(), *theirs.values()))
    links, copies, left = {}, 0, 0
    for plan in plans:
        roomy = replace(plan, local_blocks=room, remote_blocks=(room,) * len(plan.remote_blocks))
        for position, found in compile_plan(roomy, mine, theirs, tokens=tokens).items():
            links[str(plan.local_rank), str(plan.remote_ranks[position])] = found.nbytes
            left += len(found)
        for met in pair_blocks(roomy, mine, theirs, tokens):
            copies += len(met.mine) * met.read.layer_segments * len(met.read.layers)
    sent = {str(worker.rank): 0 for worker in remote.workers}
    taken: dict[str, int] = {}
    for (here, there), count in links.items():
        sent[there] += count
        taken[here] = taken.get(here, 0) + count
    return RequestCost(tokens, sum(links.values()), copies, left, sent, taken, links)


def test_ranks_of_a_thousand_share_a_few_shapes() -> None:
    """1000 x 504 ranks of 8 heads: 63 sources of each reader, in a pattern that repeats after 63 layers."""
    plans = plan_engine(planned("qwen3-32b", "tp=1000"), planned("qwen3-32b", "tp=504"))
    reads = [read for plan in plans for read in plan.reads]
    assert (len(reads), len({id(read.shape) for read in reads})) == (63_000, 504)
