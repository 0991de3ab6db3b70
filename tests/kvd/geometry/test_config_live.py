"""Geometry from a configuration equals geometry from live tensors that the installed vLLM's own code allocated.

No engine runs: vLLM's functions turn specs into groups, tensors and views as its workers do, the connector describes
the views, and the result must be what the configuration alone gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvd.geometry.config import CacheOptions, Parallel, engine_from_shape
from kvd.geometry.families import AttentionShape, LatentShape, ModelShape, RecurrentShape, model_shape
from kvd.geometry.live import BlockAxes, LiveTensor, Packing, cpu_attention_layer
from kvd.geometry.model import Region, WorkerGeometry
from kvd.geometry.shards import share
from tests.support.oracle import elements
from tests.support.processor import AMX

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # importing vLLM takes its time

BLOCKS = 6


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    pytest.importorskip("vllm", reason="vLLM is not installed: nothing to compare with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.kv_cache_utils  # noqa: F401 - warns once, here

        yield


def configured(family: str) -> ModelShape:
    """A small model of each family."""
    common: dict[str, Any] = {
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "hidden_size": 512,
    }
    mamba = {
        "mamba_expand": 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    extra: dict[str, dict[str, Any]] = {
        "llama": {},
        "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
        "gpt_oss": {"sliding_window": 128},
        "gemma3_text": {"sliding_window": 128, "sliding_window_pattern": 4},
        "qwen3_next": {
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
        },
        "nemotron_h": {
            "hybrid_override_pattern": "M-M*M-M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 16,
            "n_groups": 4,
            "conv_kernel": 4,
        },
        "granitemoehybrid": {
            **mamba,
            "layer_types": ["mamba"] * 3 + ["attention"] + ["mamba"] * 3 + ["attention"],
        },
        "falcon_h1": mamba,
    }
    return model_shape({"model_type": family, **common, **extra[family]}, family)


def specs(model: ModelShape, tp: int, block: int, padded: int | None) -> dict[str, Any]:
    """vLLM's spec of every layer on one rank."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.v1 import kv_cache_interface as v1
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds

    made: dict[str, Any] = {}
    for layer in model.layers:
        shape = layer.shape
        if isinstance(shape, LatentShape):
            made[layer.name] = v1.MLAAttentionSpec(
                block_size=block, num_kv_heads=1, head_size=shape.size, dtype=torch.bfloat16
            )
        elif isinstance(shape, AttentionShape):
            common = {
                "block_size": block,
                "num_kv_heads": share("heads", shape.heads, 0, tp).extent,
                "head_size": shape.key_size,
                "dtype": torch.bfloat16,
            }
            made[layer.name] = (
                v1.SlidingWindowSpec(**common, sliding_window=shape.window)
                if shape.window
                else v1.FullAttentionSpec(**common)
            )
        elif isinstance(shape, RecurrentShape):
            inner = shape.heads * shape.head_size
            shapes = (
                Shapes.gated_delta_net_state_shape(
                    tp, shape.groups, shape.heads, shape.state_size, shape.head_size, shape.kernel
                )
                if shape.family == "gdn"
                else Shapes.mamba2_state_shape(
                    tp, inner, shape.groups, shape.heads, shape.head_size, shape.state_size, shape.kernel
                )
            )
            made[layer.name] = v1.MambaSpec(
                block_size=model.max_tokens,
                shapes=shapes,
                dtypes=(torch.bfloat16, getattr(torch, model.state_dtype)),
                page_size_padded=padded,
                mamba_type=Kinds.GDN_ATTN if shape.family == "gdn" else Kinds.MAMBA2,
            )
    return made


def live(model: ModelShape, tp: int, rank: int, like: WorkerGeometry, layout: str) -> WorkerGeometry:
    """The geometry that the connector makes of the views that vLLM makes of its buffer."""
    import torch
    from vllm.v1 import kv_cache_interface as v1
    from vllm.v1.core import kv_cache_utils as core
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvd.geometry.rank import Rank
    from kvd.vllm.memory.groups import group_facts, layer_spec
    from kvd.vllm.memory.tensors import Place, worker_geometry

    block = max(g.block_size for g in like.groups if g.kind != "mamba")
    widest = max(len(g.layers) for g in like.groups)
    page = like.regions[0].length // (BLOCKS * widest) if model.hybrid else None
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
    every = specs(model, tp, block, page)
    groups = core.get_kv_cache_groups(config, every)
    room = BLOCKS * core._get_kv_cache_bytes_per_block(groups, chosen)
    made = core.get_kv_cache_config_from_groups(config, groups, room)
    buffer = torch.zeros(room, dtype=torch.int8)
    caches: dict[str, Any] = {}
    for cache in made.kv_cache_tensors:
        owner = next(g for g in groups if cache.layers[0] in g.layer_names)
        spec = layer_spec(owner, cache.layers[0])
        views = v1.create_kv_cache_views(buffer, spec, made.num_blocks, chosen, cache)
        caches.update(zip(cache.layers, views, strict=True))
    attention = [x.shape.heads for x in model.layers if isinstance(x.shape, AttentionShape)]
    states = [x.shape.groups for x in model.layers if isinstance(x.shape, RecurrentShape)]
    place = Place(
        rank=Rank(tp=rank),
        tp=tp,
        dcp=1,
        kv_heads=attention[0] if attention else 1,
        state_groups=states[0] if states else None,
    )
    return worker_geometry(caches, made, group_facts(made), place)


FAMILIES = (
    "llama",
    "deepseek_v3",
    "gpt_oss",
    "gemma3_text",
    "qwen3_next",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC"])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (8, 5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_gives_what_vllm_allocates(family: str, tp: int, rank: int, layout: str) -> None:
    model = configured(family)
    options = CacheOptions(layout=layout, num_blocks=BLOCKS)
    ours = engine_from_shape(model, Parallel(tp=tp), options, engine_id="e").workers[rank]
    theirs = live(model, tp, rank, ours, layout)
    assert theirs.num_blocks == ours.num_blocks
    assert theirs.groups == ours.groups
    assert theirs.regions[0].length == ours.regions[0].length


PRESETS = sorted(Path(__file__).parents[3].glob("configs/models/*.yaml"))

SPARSE: dict[str, dict[str, Any]] = {
    # As published for Gemma 3 4B: not even the number of heads is there.
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "gemma2": {"model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 6},
    "cohere2": {
        "model_type": "cohere2",
        "num_attention_heads": 64,
        "hidden_size": 8192,
        "num_hidden_layers": 9,
    },
    "qwen2": {
        "model_type": "qwen2",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "use_sliding_window": True,
        "sliding_window": 256,
        "max_window_layers": 4,
    },
    **{path.stem: yaml.safe_load(path.read_text())["config"] for path in PRESETS},
}


@pytest.mark.parametrize("name", SPARSE)
def test_what_published_files_leave_out_is_what_transformers_has(name: str) -> None:
    """vLLM asks transformers for the configuration, which completes it; here it is read as it was published."""
    from transformers import CONFIG_MAPPING

    published = SPARSE[name]
    complete = CONFIG_MAPPING[published["model_type"]].from_dict(published).to_dict()
    ours, theirs = model_shape(published, name), model_shape(complete, name)
    assert ours.layers == theirs.layers
    assert ours.depth == theirs.depth
    assert ours.state_dtype == theirs.state_dtype


@pytest.mark.parametrize(
    ("kernel", "packing"),
    [
        ("vec", "vec"),
        ("vec16", "vec"),
        pytest.param("amx", "amx", marks=pytest.mark.skipif(not AMX, reason="this processor has no AMX")),
    ],
)
def test_cpu_attention_writes_where_its_description_says(kernel: str, packing: Packing) -> None:
    """Let vLLM's kernel write a number of its own for every element and look where it went."""
    import torch
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    heads, block, size = 2, 64, 32
    cache = torch.zeros(2, heads, block, 2 * size, dtype=torch.bfloat16)
    keys, values = cache.view(2, heads, 2 * block, size).chunk(2, dim=2)
    codes = torch.arange(1, 2 * block * heads * size + 1, dtype=torch.int16).view(2, block, heads, size)
    written = [c.view(torch.bfloat16).contiguous() for c in codes]
    cpu_attn_reshape_and_cache(*written, keys, values, torch.arange(block), kernel)
    page = cache[0].reshape(-1).view(torch.int16).numpy()
    tensor = LiveTensor(
        "l", 0, (2, heads, block, 2 * size), tuple(2 * s for s in cache.stride()), "bfloat16", 2
    )
    layer = cpu_attention_layer(
        tensor,
        (Region(0, cache.numel() * 2),),
        blocks=BlockAxes(2, block),
        heads=share("heads", heads, 0, 1),
        key_size=size,
        value_size=size,
        packing=packing,
    )
    for which, fld in enumerate(layer.page.fields):
        where, offset = elements(fld)
        want = codes.numpy()[which][where["token"], where["head"], where["dim"]]
        assert (page[offset // 2] == want).all()
