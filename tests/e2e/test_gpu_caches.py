"""The caches of vLLM's GPU runner, in its own shapes and strides but CPU memory: every byte is where geometry says.

`make e2e-builds` runs it on 0.26 to 0.28, whose runner makes these tensors in one function.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.vllm.memory.caches import in_one_form
from kvd.vllm.memory.groups import group_facts
from kvd.vllm.memory.tensors import Place, worker_geometry
from tests.support.vllm_builds import lacks

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]

BLOCKS = 10
MARKED = 3
"""The block that is written."""
LATENT = 576


@pytest.fixture
def reshape() -> Callable[..., dict[str, Any]]:
    from vllm.v1.worker.gpu import attn_utils

    found: Callable[..., dict[str, Any]] | None = getattr(attn_utils, "_reshape_kv_cache", None)
    return found or lacks("_reshape_kv_cache, which makes the caches of its GPU runner", last="0.28")


def attention(name: str) -> Any:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(
        {
            "flash": "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
            "triton": "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
            "mla": "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend",
        }[name]
    )


def made(
    reshape: Callable[..., dict[str, Any]],
    groups: Sequence[tuple[Any, tuple[str, ...], Any, int]],
    blocks: int = BLOCKS,
) -> tuple[dict[str, Any], WorkerGeometry]:
    """vLLM's caches of groups (spec, layers, attention, tokens of a kernel block), and the geometry that they give."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    size = max(spec.page_size_bytes for spec, *_ in groups) * blocks
    tensors = [
        KVCacheTensor(size=size, shared_by=[names[i] for _, names, *_ in groups if i < len(names)])
        for i in range(max(len(names) for _, names, *_ in groups))
    ]
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(list(names), spec) for spec, names, *_ in groups],
    )
    raw: dict[str, Any] = {}
    for tensor in tensors:
        memory = torch.zeros(size, dtype=torch.int8)
        raw |= dict.fromkeys(tensor.shared_by, memory)
    layers = [
        SimpleNamespace(kv_cache_group_id=i, kv_cache_spec=spec, layer_names=list(names), backend=backend)
        for i, (spec, names, backend, _) in enumerate(groups)
    ]
    caches = reshape(layers, raw, "auto", [tokens for *_, tokens in groups], {}, config)
    heads = next((spec.num_kv_heads for spec, *_ in groups if hasattr(spec, "num_kv_heads")), 1)
    where = Place(rank=Rank(0, 0, 0), tp=1, dcp=1, kv_heads=heads)
    return caches, worker_geometry(in_one_form(caches, torch.int8), config, group_facts(config), where)


def the_bytes_are_there(caches: dict[str, Any], worker: WorkerGeometry) -> None:
    """What is written into a block by vLLM's tensor stands in the page, and fills it."""
    for group in worker.groups:
        for layer in group.layers:
            region = worker.regions[layer.region]
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.length).from_address(region.address))
            memory[:] = 0
            cache = caches[layer.name]
            for tensor in cache if isinstance(cache, list) else [cache]:
                kernel = tensor.shape[0] // BLOCKS
                tensor[MARKED * kernel : (MARKED + 1) * kernel].fill_(-1)
            first = layer.offset + MARKED * layer.stride
            written = np.flatnonzero(memory)
            assert written.min() == first
            assert written.max() < first + layer.stride
            assert len(np.flatnonzero(memory[first : first + layer.page.size])) >= layer.page.content // 2


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_attention(reshape: Callable[..., dict[str, Any]], backend: str, layout: Any) -> None:
    import torch
    from vllm.v1.attention.backends.utils import set_kv_cache_layout
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    set_kv_cache_layout(layout)
    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
    caches, worker = made(
        reshape,
        [(full, ("a0", "a1"), attention(backend), 16), (window, ("w0", "w1"), attention(backend), 16)],
    )
    the_bytes_are_there(caches, worker)
    layer = worker.layers["a0"][1]
    heads, tokens = (next(a for a in layer.page.by_name["k"].axes if a.label == n) for n in ("head", "token"))
    assert (heads.stride > tokens.stride) == (layout == "HND")


def test_latents(reshape: Callable[..., dict[str, Any]]) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16)
    caches, worker = made(reshape, [(spec, ("l0", "l1"), attention("mla"), 64)])
    the_bytes_are_there(caches, worker)
    assert worker.layers["l0"][1].page.content == 64 * LATENT * 2


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_states_beside_attention(reshape: Callable[..., dict[str, Any]], layout: Any) -> None:
    """As of Qwen3-Next on one GPU: three groups of states and one of attention over the same pages."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.attention.backends.utils import set_kv_cache_layout
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    set_kv_cache_layout(layout)
    state = MambaSpec(
        block_size=4096,
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )
    token = 2 * 2 * 256 * 2
    tokens = math.ceil(state.page_size_bytes / token / 16) * 16
    full = FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    content = state.page_size_bytes
    state = replace(state, page_size_padded=full.page_size_bytes)
    states = [(state, (f"m{i}", f"m{i + 1}"), None, 4096) for i in (0, 2, 4)]
    caches, worker = made(reshape, [*states, (full, ("a0", "a1"), attention("triton"), 16)])
    the_bytes_are_there(caches, worker)
    layer = worker.layers["m0"][1]
    assert (layer.page.content, layer.stride) == (content, full.page_size_bytes)
    assert list(layer.page.by_name) == ["conv.q", "conv.k", "conv.v", "ssm"]
