"""KV memory in which all layers of a block stand together, as vLLM itself makes it: a row of blocks is one run.

On CPU memory, with vLLM's own functions: 0.26 to 0.28 have one for this, from 0.29 on it is a layout among others.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.plan import plan_worker
from kvd.vllm.memory.caches import by_layer, in_one_form
from kvd.vllm.memory.groups import group_facts
from kvd.vllm.memory.tensors import Place, worker_geometry
from tests.support.vllm_builds import lacks

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BLOCKS = 10
LAYERS = 3
LATENT = 576
PLACE = Place(rank=Rank(0, 0, 0), tp=1, dcp=1, kv_heads=8)


def spec_of(kind: str) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    if kind == "mla":
        return vllm.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16)
    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    if kind == "window":
        return vllm.SlidingWindowSpec(**shape, sliding_window=64)
    return vllm.FullAttentionSpec(**shape)


def runs(worker: WorkerGeometry, group: int) -> list[int]:
    """Bytes of each descriptor of four blocks of a group, three of them in a row."""
    plan = plan_worker(worker, (worker,), (worker,))
    blocks = {group: BlockList(0, np.array([7, 2, 3, 4], np.int64))}
    (rows,) = compile_plan(plan, blocks, blocks, tokens=4 * worker.groups[group].block_size).values()
    return sorted(rows.length.tolist())


def stands_in_its_block(caches: dict[str, Any], worker: WorkerGeometry, name: str) -> None:
    """What is written into a layer's block by vLLM's tensor is in that block of the geometry, and nowhere else."""
    layer, region = worker.layers[name][1], worker.regions[0]
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.length).from_address(region.address))
    memory[:] = 0
    caches[name][7].fill_(-1)
    written = np.flatnonzero(memory)
    first = layer.offset + 7 * layer.stride
    assert (written.min(), written.max() < first + layer.page.size) == (first, True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("full", "flash_attn.FlashAttentionBackend"),
        ("full", "triton_attn.TritonAttentionBackend"),
        ("mla", "mla.triton_mla.TritonMLABackend"),
    ],
)
def test_the_memory_of_builds_that_join_layers(kind: str, backend: str, layout: Any) -> None:
    import torch
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    if not hasattr(KVConnectorModelRunnerMixin, "allocate_uniform_kv_caches"):
        lacks(
            "allocate_uniform_kv_caches: a layout joins the layers, which the tests above look at",
            last="0.28",
        )
    from vllm.v1.attention.backends.utils import set_kv_cache_layout

    set_kv_cache_layout(layout)
    attended = resolve_obj_by_qualname(f"vllm.v1.attention.backends.{backend}")
    assert attended.indexes_kv_by_block_stride()
    spec, names = spec_of(kind), [f"l{n}" for n in range(LAYERS)]
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[KVCacheTensor(size=spec.page_size_bytes * BLOCKS, shared_by=[n]) for n in names],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )
    group = SimpleNamespace(kv_cache_spec=spec, backend=attended)
    caches, whole, _ = KVConnectorModelRunnerMixin.allocate_uniform_kv_caches(
        config, [[group]], "auto", torch.device("cpu"), [spec.block_size]
    )
    given = by_layer(whole, attended, config.kv_cache_tensors)
    assert {n: (t.data_ptr(), t.shape, t.stride()) for n, t in given.items()} == {
        n: (t.data_ptr(), t.shape, t.stride()) for n, t in caches.items()
    }
    worker = worker_geometry(in_one_form(given, torch.int8), config, group_facts(config), PLACE)
    assert runs(worker, 0) == [LAYERS * spec.page_size_bytes, 3 * LAYERS * spec.page_size_bytes]


@pytest.mark.parametrize("kinds", [("full",), ("full", "window"), ("mla",)])
@pytest.mark.parametrize("layout", ["BLHNC", "BHLNC", "BLNHC"])
def test_the_memory_of_builds_that_name_layers(kinds: tuple[str, ...], layout: str) -> None:
    import torch

    layouts = pytest.importorskip("vllm.v1.kv_cache_layout")
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.worker.utils import allocate_kv_cache

    named = layouts.KVCacheLayout[layout]
    specs = [spec_of(kind) for kind in kinds]
    groups = [KVCacheGroupSpec([f"{g}.{n}" for n in range(LAYERS)], spec) for g, spec in enumerate(specs)]
    configured = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: named,
        ),
    )
    config = get_kv_cache_config_from_groups(configured, groups, 1 << 30)
    caches = allocate_kv_cache(config, torch.device("cpu"), named, [spec.block_size for spec in specs])
    worker = worker_geometry(in_one_form(caches, torch.int8), config, group_facts(config), PLACE)
    for group, spec in enumerate(specs):
        assert runs(worker, group) == [LAYERS * spec.page_size_bytes, 3 * LAYERS * spec.page_size_bytes]
        if layout.startswith("BL"):
            stands_in_its_block(caches, worker, f"{group}.1")
