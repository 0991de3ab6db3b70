"""Quantised pages as the installed vLLM makes them, copied by plans and read through its views.

No engine runs: the backends that make such pages need a GPU, but what they say of a page, and how vLLM allocates and
views it, are plain functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvd.topology.plan import plan_worker
from tests.support.live_caches import HEADS, SIZE, cache, read
from tests.support.raising import raises

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # importing vLLM takes its time


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    pytest.importorskip("vllm", reason="vLLM is not installed: nothing to compare with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.kv_cache_utils  # noqa: F401 - warns once, here

        yield


def packed(kind: str, tp: int, block: int = 16) -> Any:
    """The spec of a layer with keys and values in a quantised format, as its backend completes it."""
    import torch
    from vllm.v1 import kv_cache_interface as v1

    spec = v1.FullAttentionSpec(
        block_size=block,
        num_kv_heads=max(1, HEADS // tp),
        head_size=SIZE,
        dtype=torch.uint8,
        kv_quant_mode=v1.get_kv_quant_mode(kind),
    )
    if kind == "ultraquant_4bit":
        # What its backend does; the backend's own module asks for a GPU's kernels.
        from vllm.v1.attention.ops.ultraquant.format import slot_size

        return replace(spec, state_content_bytes=slot_size(SIZE))
    if kind.startswith("turboquant"):
        from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend as Backend
    else:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend as Backend
    return Backend.customize_spec(spec)


PACKED = (
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC"])
@pytest.mark.parametrize("kind", PACKED)
def test_cells_with_scales_are_all_of_a_page_and_go_to_the_rank_of_their_head(kind: str, layout: str) -> None:
    layers = ("l0", "l1")
    whole = cache({name: packed(kind, 1) for name in layers}, layout=layout)
    halves = [cache({name: packed(kind, 2, block=32) for name in layers}, 2, r, layout) for r in (0, 1)]
    spec = packed(kind, 1)
    assert spec.state_content_bytes is not None
    page = whole.geometry.groups[0].layers[0].page
    assert page.content == spec.unpadded_page_size_bytes == 16 * HEADS * spec.state_content_bytes
    for half in halves:
        read(half, halves, [whole], [6, 2], [5, 1, 4, 7], tokens=64)
    for rank, half in enumerate(halves):
        for name in layers:
            for token in range(64):
                want = whole.views[name][[5, 1, 4, 7][token // 16], 2 * rank : 2 * rank + 2, token % 16]
                assert (half.views[name][[6, 2][token // 32], :, token % 32] == want).all()


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_scales_stand_where_the_triton_backend_looks_for_them(layout: str) -> None:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    def scales(view: Any) -> tuple[Any, Any]:
        impl = object.__new__(TritonAttentionImpl)
        impl._ensure_scale_caches(view)  # fills them with ones
        assert impl._k_scale_cache is not None
        assert impl._v_scale_cache is not None
        return impl._k_scale_cache, impl._v_scale_cache

    whole = cache({"l0": packed("fp8_per_token_head", 1)}, layout=layout)
    halves = [cache({"l0": packed("fp8_per_token_head", 2)}, 2, r, layout) for r in (0, 1)]
    source = scales(whole.views["l0"])
    for number, side in enumerate(source):
        side.uniform_(number + 1, number + 2)
    for rank, half in enumerate(halves):
        copied = scales(half.views["l0"])
        read(half, halves, [whole], [3, 4], [7, 1], tokens=32)
        for mine, theirs in zip(copied, source, strict=True):
            assert (mine[[3, 4]] == theirs[[7, 1]][:, :, 2 * rank : 2 * rank + 2]).all()


def latent(kind: str, block: int, window: int | None = None) -> Any:
    """The spec of an MLA layer, as vLLM's MLAAttention asks for it and its backend completes it."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.v1 import kv_cache_interface as v1

    common = {
        "block_size": block,
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        "head_size": 576,
        "dtype": torch.bfloat16 if kind == "auto" else torch.uint8,
        "cache_dtype_str": kind,
        "kv_quant_mode": v1.get_kv_quant_mode(kind),
        "state_content_bytes": {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(kind),
    }
    if window is not None:
        return v1.SlidingWindowMLASpec(**common, sliding_window=window)
    return MLACommonBackend.customize_spec(v1.MLAAttentionSpec(**common))


def index(block: int) -> Any:
    """The index of DeepSeek V3.2: 128 values and a float32 scale a token."""
    import torch
    from vllm.v1 import kv_cache_interface as v1

    return v1.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=v1.SparseCacheRole.INDEXER,
    )


@pytest.mark.parametrize(
    ("kind", "cell"),
    [("auto", 1152), ("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352), ("fp8_per_token_head", 584)],
)
@pytest.mark.parametrize("window", [None, 64])
def test_latents_are_the_same_on_every_rank_whatever_their_cells(
    kind: str, cell: int, window: int | None
) -> None:
    import torch

    if window is not None and kind == "fp8_per_token_head":
        cell = 576  # only the common backend adds scales, and it has no windows
    halves = [cache({"l0": latent(kind, 64, window)}, 2, rank) for rank in (0, 1)]
    alone = cache({"l0": latent(kind, 128, window)})
    assert alone.geometry.groups[0].kind == ("mla" if window is None else "sliding_window")
    assert alone.geometry.groups[0].window == window
    assert alone.geometry.groups[0].layers[0].page.content == 128 * cell
    first = halves[0].geometry.groups[0].layers[0].page
    assert first == halves[1].geometry.groups[0].layers[0].page
    halves[1].views["l0"].copy_(halves[0].views["l0"])
    read(alone, [alone], halves, [5], [3, 6], tokens=128)
    got, want = alone.views["l0"][5, 0], halves[0].views["l0"][[3, 6], 0].reshape(128, -1)
    assert (got.view(torch.uint8) == want.view(torch.uint8)).all()


def test_an_index_moves_whole_between_blocks_of_one_size() -> None:
    """Its views show a scale behind each token; its kernels put all values first, and so does the plan."""
    specs = {"l0.attn": latent("fp8_ds_mla", 64), "l0.index": index(64)}
    here, there = cache(specs), cache(specs)
    page = here.geometry.layers["l0.index"][1].page
    assert [(f.name, f.dtype) for f in page.fields] == [("block", "packed none, blocks of 64 tokens")]
    assert page.content == index(64).unpadded_page_size_bytes == 64 * 132
    read(here, [here], [there], [1, 2], [6, 4], tokens=100)
    for name in specs:
        assert (here.views[name][[1, 2]] == there.views[name][[6, 4]]).all()


def test_an_index_of_other_blocks_is_refused() -> None:
    small, large = cache({"l0.index": index(64)}), cache({"l0.index": index(128)})
    with raises("KVD-TOPOLOGY-FIELD", match=r"field block is packed none, blocks of 64 tokens .*128 tokens"):
        plan_worker(small.geometry, [small.geometry], [large.geometry])


def test_windowed_latents_of_deepseek_v4_move_by_block() -> None:
    import torch
    from vllm.v1 import kv_cache_interface as v1

    spec = v1.SlidingWindowMLASpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=128,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=v1.get_kv_quant_mode("fp8_ds_mla"),
        state_content_bytes=584,
        alignment=576,
        model_version="deepseek_v4",
    )
    made = cache({"l0": spec}).geometry
    layer = made.groups[0].layers[0]
    assert (made.groups[0].kind, made.groups[0].window) == ("sliding_window", 128)
    assert layer.page.content == 64 * 584
    assert layer.stride == spec.page_size_bytes == 65 * 576  # padded to the kernel's rows
