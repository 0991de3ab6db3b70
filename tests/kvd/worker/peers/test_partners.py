"""kvd's partners of a worker are those of the worker's own plans, made with siblings that vLLM's tensors tell of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvd.geometry.alike import AlikeReader
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.peers.comparer.exchange import KindsRead, find_exchange
from kvd.topology.plan import plan_worker
from kvd.topology.push import plan_push
from kvd.vllm.memory.groups import group_facts
from kvd.vllm.memory.tensors import Place, sibling_geometries, worker_geometry
from kvd.wire.identity import WorkerCard
from tests.support.daemons import facts, worker
from tests.support.rigs.bench import (
    BF16,
    F32,
    I8,
    NUMPY,
    MambaSpec,
    MLAAttentionSpec,
    Tensor,
    cache_config,
    dense,
    full,
    groups_of,
    place,
)

LAYERS = tuple(f"l{number}" for number in range(5))
Caches = tuple[dict[str, Tensor], SimpleNamespace]


def tensors(*shape: int) -> dict[str, Tensor]:
    return {
        name: Tensor(np.zeros(int(np.prod(shape)), NUMPY[BF16]), BF16, shape, dense(shape)) for name in LAYERS
    }


def attention(heads: int) -> Callable[[int], tuple[Caches, int]]:
    """What a rank of so many has of a model of so many heads, and the heads."""

    def caches(tp: int) -> tuple[Caches, int]:
        here = max(1, heads // tp)
        return (tensors(8, here, 4, 8), cache_config(8, (full(heads=here), LAYERS))), heads

    return caches


def latents(_tp: int) -> tuple[Caches, int]:
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    return (tensors(8, 1, 4, 8), cache_config(8, (spec, LAYERS))), 1


def states(tp: int) -> tuple[Caches, int]:
    """States and attention in the same memory, of as many heads on every number of ranks."""
    here = 8 // tp
    state = MambaSpec(
        block_size=4,
        mamba_type=SimpleNamespace(name="GDN_ATTN"),
        shapes=((3, 6 * here), (here, 2, 2)),
        dtypes=(BF16, F32),
        num_speculative_blocks=0,
    )
    size = 3 * 6 * here * 2 + here * 2 * 2 * 4
    made = {"s": Tensor(np.zeros(8 * 512, np.int8), I8, (8, 1, 1, size), (512, size, size, 1))}
    kv, config = tensors(8, here, 4, 8), cache_config(8, (state, ("s",)), (full(heads=here), LAYERS))
    return ({**made, **kv}, config), 8


class Ranks:
    """An engine of so many ranks: each with its siblings as it finds them, and all as kvd has them of their cards."""

    def __init__(self, of: Callable[[int], tuple[Caches, int]], tp: int) -> None:
        (caches, config), heads = of(tp)
        groups = groups_of(config)
        places = [place(rank, tp, kv_heads=heads) for rank in range(tp)]
        self.siblings = [sibling_geometries(caches, config, groups, one) for one in places]
        self.own = [worker_geometry(caches, config, groups, one) for one in places]
        self.card = card_of(self.own)
        reader, self.kinds = AlikeReader(), KindsRead()
        read = [reader.read_document(one.geometry)[0] for one in self.card]
        for one, geometry in zip(self.card, read, strict=True):
            self.kinds.add(one, geometry)
        self.geometry = EngineGeometry("e", "g", "m", tp, 1, 1, tuple(read))


def card_of(workers: list[WorkerGeometry]) -> tuple[WorkerCard, ...]:
    """The workers of the engine's card, which registered in any order."""
    made = LocalEngine(facts("e", tp=len(workers)), generation="g")
    for geometry in sorted(workers, key=lambda one: one.rank.tp * 7 % 5):
        presented = worker(made.facts, geometry.rank.tp).card
        card = replace_geometry(presented, geometry)
        made.take(Client("worker", card.engine, card.incarnation, 1, b"r", rank=card.rank, card=card))
    return made.card().workers


def replace_geometry(card: WorkerCard, geometry: WorkerGeometry) -> WorkerCard:
    return WorkerCard(
        engine=card.engine, rank=geometry.rank, incarnation=card.incarnation, pid=1, host="h", backend="nixl",
        geometry=encode_worker(geometry), metadata=b"m",
    )  # fmt: skip


@pytest.mark.parametrize(
    "of", [attention(8), attention(2), latents, states], ids=["gqa", "gqa of two heads", "mla", "mamba"]
)
@pytest.mark.parametrize(("here", "there"), [(1, 1), (4, 4), (8, 8), (4, 8), (8, 4), (2, 8), (8, 1)])
def test_partners_are_all_that_a_worker_s_own_plans_need(
    of: Callable[[int], tuple[Caches, int]], here: int, there: int
) -> None:
    local, remote = Ranks(of, here), Ranks(of, there)
    theirs = remote.geometry.workers
    reads, both = (
        find_exchange(local.geometry, remote.geometry, remote.kinds, pushes=pushes)
        for pushes in (False, True)
    )
    assert reads is not None
    assert both is not None
    for rank, siblings in enumerate(local.siblings):
        assert [one.rank for one in siblings] == [one.rank for one in local.geometry.workers]
        assert siblings[rank] == local.own[rank] == local.geometry.workers[rank]
        mine = tuple(local.own[rank] if one.rank == Rank(tp=rank) else one for one in siblings)
        assert plan_worker(mine[rank], mine, theirs).sources == reads.partners[rank]
        read = {at for at, one in enumerate(theirs) if plan_push(mine[rank], mine, theirs, one.rank)}
        assert read == set(reads.partners[rank])
        written = {at for at, one in enumerate(theirs) if plan_push(one, theirs, mine, Rank(tp=rank))}
        assert read | written == set(both.partners[rank])


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_a_card_of_tensor_parallel_ranks_is_in_the_order_of_siblings(tp: int) -> None:
    (caches, config), heads = latents(tp)
    siblings = sibling_geometries(caches, config, groups_of(config), place(tp - 1, tp, kv_heads=heads))
    assert [one.rank for one in card_of(list(siblings))] == [one.rank for one in siblings]


def test_a_card_of_context_parallel_ranks_is_in_another_order_so_it_is_told_whole() -> None:
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    config = cache_config(8, (spec, LAYERS))
    where = Place(rank=Rank(), tp=4, dcp=2, kv_heads=1, interleave=1)
    siblings = sibling_geometries(tensors(8, 1, 4, 8), config, group_facts(config, 2), where)
    card = card_of(list(siblings))
    assert [one.rank for one in card] != [one.rank for one in siblings]
    kinds = KindsRead()
    ordered = tuple(sorted(siblings, key=lambda one: one.rank))
    for one, geometry in zip(card, ordered, strict=True):
        kinds.add(one, geometry)
    engine = EngineGeometry("e", "g", "m", 4, 1, 2, ordered)
    for said in (engine, replace(engine, dcp=1)):
        assert find_exchange(said, said, kinds, pushes=True) is None
