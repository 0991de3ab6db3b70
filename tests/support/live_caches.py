"""Caches as the installed vLLM allocates and views them, with the geometry that the connector makes of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.plan import plan_worker

BLOCKS, HEADS, SIZE = 8, 4, 128


@dataclass(frozen=True)
class Cache:
    """One worker's layers: vLLM's views of its buffer, and the geometry that the connector makes of them."""

    views: dict[str, Any]
    geometry: WorkerGeometry


def cache(specs: dict[str, Any], tp: int = 1, rank: int = 0, layout: str = "LBNHC", dcp: int = 1) -> Cache:
    """What a worker has of these layers, full of random bytes."""
    import torch
    from vllm.v1 import kv_cache_interface as v1
    from vllm.v1.core import kv_cache_utils as core
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvd.vllm.memory.groups import group_facts, layer_spec
    from kvd.vllm.memory.tensors import Place, worker_geometry

    chosen = KVCacheLayout[layout]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: chosen,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=None,
        ),
        speculative_config=None,
        model_config=None,
    )
    groups = core.get_kv_cache_groups(config, specs)
    room = BLOCKS * core._get_kv_cache_bytes_per_block(groups, chosen)
    made = core.get_kv_cache_config_from_groups(config, groups, room)
    buffer = torch.randint(-128, 127, (room,), dtype=torch.int8)
    views: dict[str, Any] = {}
    for one in made.kv_cache_tensors:
        owner = next(g for g in groups if one.layers[0] in g.layer_names)
        spec = layer_spec(owner, one.layers[0])
        found = v1.create_kv_cache_views(buffer, spec, made.num_blocks, chosen, one)
        views.update(zip(one.layers, found, strict=True))
    place = Place(rank=Rank(tp=rank, dcp=rank % dcp), tp=tp, dcp=dcp, kv_heads=HEADS)
    return Cache(views, worker_geometry(views, made, group_facts(made, dcp), place))


def read(
    mine: Cache, peers: list[Cache], theirs: list[Cache], here: list[int], there: list[int], tokens: int
) -> None:
    """Copy a request's blocks as the connector would: group 0, these ids on either side."""
    plan = plan_worker(mine.geometry, [p.geometry for p in peers], [t.geometry for t in theirs])
    lists = [{g.index: BlockList(0, np.array(ids)) for g in mine.geometry.groups} for ids in (here, there)]
    for rows in compile_plan(plan, *lists, tokens=tokens).values():
        for local, remote, length in zip(rows.local, rows.remote, rows.length, strict=True):
            ctypes.memmove(int(local), int(remote), int(length))
