"""Plans of all workers of an engine share what they have in common, and are the plans that each would make alone."""

from __future__ import annotations

import numpy as np
import pytest

from kvctl.engines.sources import planned
from kvd.geometry.model import EngineGeometry
from kvd.topology import plan as planning
from kvd.topology.describe import plan_engine
from kvd.topology.plan import Plan, plan_worker

PAIRS = (
    ("qwen3-32b", "tp=16", "tp=4,pp=2"),
    ("qwen3-32b", "tp=2,block_size=32", "tp=16,layout=HND"),
    ("deepseek-v3", "tp=4", "tp=8,dcp=2"),
    ("qwen3-next-80b-a3b", "tp=4", "tp=2"),
)


def engines(model: str, local: str, remote: str) -> tuple[EngineGeometry, EngineGeometry]:
    return planned(model, local), planned(model, remote)


def plain(plan: Plan) -> object:
    """Everything of a plan, with arrays as lists."""
    reads = [
        (
            read.remote, read.group, read.remote_group, read.phase, read.layers, read.heads, read.layer_bytes,
            *(np.asarray(column).tolist() for column in (read.rows.local, read.rows.remote, read.rows.length)),
        )
        for read in plan.reads
    ]  # fmt: skip
    return (
        plan.local_rank,
        plan.remote_ranks,
        plan.block_sizes,
        plan.remote_block_sizes,
        plan.remote_blocks,
        reads,
    )


@pytest.mark.parametrize(("model", "local", "remote"), PAIRS)
def test_plans_made_together_are_those_made_alone(model: str, local: str, remote: str) -> None:
    here, there = engines(model, local, remote)
    together = plan_engine(here, there)
    for plan in together[:: max(1, len(together) // 4)]:
        alone = plan_worker(here.by_rank[plan.local_rank], here.workers, there.workers)
        assert plain(plan) == plain(alone)


def test_what_workers_have_in_common_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 heads on 64 ranks make 8 kinds of worker: not 64 x 64 layers are looked at, nor 64 pages cut."""
    here, there = engines("qwen3-32b", "tp=64", "tp=32")
    asked = {"_wanted": 0, "cut_page": 0, "_kinds": 0, "_block_sizes": 0}

    def counted(name: str) -> None:
        whole = getattr(planning, name)

        def counting(*values: object) -> object:
            asked[name] += 1
            return whole(*values)

        monkeypatch.setattr(planning, name, counting)

    for name in asked:
        counted(name)
    assert len(plan_engine(here, there)) == 64
    assert asked == {"_wanted": 8 * 64, "cut_page": 8, "_kinds": 2, "_block_sizes": 1}


def test_workers_of_a_kind_share_their_groups() -> None:
    engine = planned("qwen3-32b", "tp=64")
    assert len({id(worker.groups) for worker in engine.workers}) == 8
    assert len({worker.regions[0].address for worker in engine.workers}) == 64
