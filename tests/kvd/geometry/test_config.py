"""Geometry from a model's configuration: figures worked out by hand, and those seen on live engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvd.geometry.config import CacheOptions, Parallel, engine_from_shape
from kvd.geometry.errors import BadGeometry
from kvd.geometry.families import RecurrentShape
from kvd.geometry.model import EngineGeometry
from kvd.geometry.presets import Preset, preset
from tests.support.raising import raises
from tests.support.samples import engine_from_config

PRESETS = sorted(Path(__file__).parents[3].glob("configs/models/*.yaml"))


def load(name: str) -> Preset:
    path = next(p for p in PRESETS if p.stem == name)
    return preset(yaml.safe_load(path.read_text()))


def build(name: str, parallel: Parallel | None = None, **options: Any) -> EngineGeometry:
    return engine_from_shape(load(name).shape, parallel or Parallel(), CacheOptions(**options), engine_id="e")


def summary(engine: EngineGeometry) -> list[tuple[str, int, int, int]]:
    """Kind, block size, layers and content of a page of each group of the first worker."""
    return [(g.kind, g.block_size, len(g.layers), g.layers[0].page.content) for g in engine.workers[0].groups]


def gdn(**changes: Any) -> dict[str, Any]:
    """The tiny Qwen3.5 of field-notes.md: 8 layers, every fourth with attention."""
    text = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }
    return {"model_type": "qwen3_5", "text_config": {**text, **changes}}


def test_llama_70b_on_four_ranks() -> None:
    # 2 heads a rank x 16 tokens x (128 + 128) x 2 bytes = 16,384.
    assert summary(build("llama-3.1-70b", Parallel(tp=4))) == [("full", 16, 80, 16_384)]


def test_more_ranks_than_heads_replicate() -> None:
    engine = build("qwen3-235b-a22b", Parallel(tp=8))
    keys = [w.groups[0].layers[0].page.by_name["k"].axes_of("head")[0] for w in engine.workers]
    assert [axis.start for axis in keys] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {axis.extent for axis in keys} == {1}


def test_a_page_of_fp8_is_half_as_large() -> None:
    assert summary(build("llama-3.1-8b", cache_dtype="fp8"))[0][3] * 2 == summary(build("llama-3.1-8b"))[0][3]


def test_deepseek_latents_are_the_same_on_every_rank() -> None:
    # 16 tokens x 576 x 2 bytes.
    engine = build("deepseek-v3", Parallel(tp=8))
    assert summary(engine) == [("mla", 16, 61, 18_432)]
    assert len({w.groups[0].layers[0].page for w in engine.workers}) == 1
    assert len({id(w.groups) for w in engine.workers}) == 1, "planning looks at each kind of worker once"


def test_context_parallel_ranks_hold_every_nth_token() -> None:
    engine = build("deepseek-v3", Parallel(tp=8, dcp=4))
    assert summary(engine) == [("mla", 64, 61, 18_432)]
    assert [w.rank.dcp for w in engine.workers] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_gemma_has_groups_of_as_many_layers_as_have_full_attention() -> None:
    # 62 layers: 10 full and 52 windowed, which make 6 groups of at most 10.
    assert [(kind, layers) for kind, _, layers, _ in summary(build("gemma-3-27b"))] == [
        ("sliding_window", 9),
        ("sliding_window", 9),
        ("sliding_window", 9),
        ("sliding_window", 9),
        ("sliding_window", 8),
        ("sliding_window", 8),
        ("full", 10),
    ]


def test_gpt_oss_has_one_group_of_each_kind() -> None:
    # 8 heads x 16 tokens x 128 x 2 bytes.
    assert summary(build("gpt-oss-120b")) == [("sliding_window", 16, 18, 32_768), ("full", 16, 18, 32_768)]


def test_without_the_hybrid_manager_all_layers_share_a_group() -> None:
    assert [(kind, layers) for kind, _, layers, _ in summary(build("gpt-oss-120b", one_group=True))] == [
        ("full", 36)
    ]


def test_the_gdn_engine_of_the_field_notes() -> None:
    # State: conv 3 x 1,024 x 2 + ssm 4 x 128 x 128 x 4 = 268,288 bytes. A token of attention: 2 heads x 128 x 2 = 512
    # bytes, so 524 tokens hold a state; the next multiple of 128 is 640, and the page 327,680.
    options = CacheOptions(block_size=128, kernel_block=32, align=True, layout="HND")
    engine = engine_from_config(gdn(), Parallel(), options, engine_id="e")
    assert summary(engine) == [("mamba", 640, 2, 268_288)] * 3 + [("full", 640, 2, 327_680)]
    assert {layer.stride for g in engine.workers[0].groups for layer in g.layers} == {327_680}


def test_groups_of_a_hybrid_stand_over_the_same_bytes() -> None:
    engine = engine_from_config(gdn(), Parallel(), CacheOptions(num_blocks=4), engine_id="e")
    worker = engine.workers[0]
    assert len({worker.page_address(g.layers[0]) for g in worker.groups}) == 1


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_layouts_differ_in_strides_only(layout: str) -> None:
    engine = build("llama-3.1-8b", layout=layout, num_blocks=4)
    first, second = engine.workers[0].groups[0].layers[:2]
    content = first.page.content
    assert (second.offset - first.offset, first.stride) == (
        (content, 32 * content) if layout.startswith("B") else (4 * content, content)
    )
    head, token = (
        next(a for a in first.page.fields[0].axes if a.label == label) for label in ("head", "token")
    )
    assert (head.stride > token.stride) == layout.endswith("HNC")


def test_a_cpu_keeps_keys_transposed() -> None:
    # 8 heads of 128 tokens: keys of a head are 128 x 128 x 2 bytes, its values follow.
    options: dict[str, Any] = {"block_size": 128, "kernel_block": 32, "layout": "HND", "num_blocks": 4}
    engine = build("llama-3.1-8b", packing="vec", **options)
    keys, values = engine.workers[0].groups[0].layers[0].page.fields
    assert (keys.axes_of("token")[0].stride, keys.axes_of("dim")[0].stride) == (2, 256)
    assert (values.offset, values.axes_of("token")[0].stride) == (32_768, 256)
    assert summary(engine) == summary(build("llama-3.1-8b", **options))


def test_speculative_tokens_lengthen_the_convolution() -> None:
    plain, longer = (
        engine_from_config(gdn(), Parallel(), CacheOptions(speculative_tokens=n), engine_id="e")
        for n in (0, 2)
    )
    fields = [e.workers[0].groups[0].layers[0].page.by_name["conv.q"] for e in (plain, longer)]
    assert [dict(f.shape)["tap"] for f in fields] == [3, 5]
    assert longer.workers[0].groups[0].scratch_blocks == 2


def test_stages_take_the_layers_that_are_left_over_before_the_last() -> None:
    engine = build("deepseek-v3", Parallel(pp=4))
    assert [len(w.groups[0].layers) for w in engine.workers] == [15, 15, 16, 15]


def test_a_partition_is_taken_as_given() -> None:
    engine = build("llama-3.1-8b", Parallel(pp=2, partition=(10, 22)))
    assert [len(w.groups[0].layers) for w in engine.workers] == [10, 22]


def test_falcon_numbers_its_states_after_its_layers() -> None:
    engine = build("falcon-h1-7b")
    assert [(g.kind, len(g.layers)) for g in engine.workers[0].groups] == [("full", 44), ("mamba", 44)]
    assert engine.workers[0].groups[1].layers[0].name == "model.44.mixer"


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_preset_makes_an_engine(path: Path, tp: int) -> None:
    found = preset(yaml.safe_load(path.read_text()))
    assert found.name == path.stem
    assert found.source.startswith("https://huggingface.co/")
    assert found.read.startswith("https://")
    counts = [layer.shape.heads for layer in found.shape.layers if isinstance(layer.shape, RecurrentShape)]
    engine = engine_from_shape(found.shape, Parallel(tp=tp), CacheOptions(), engine_id="e")
    assert len(engine.workers) == tp
    assert all(count % tp == 0 for count in counts)


def test_hybrids_have_one_page_size_in_all_groups() -> None:
    for name in ("qwen3-next-80b-a3b", "nemotron-h-8b", "granite-4.0-h-small", "falcon-h1-7b"):
        worker = build(name, Parallel(tp=2)).workers[0]
        assert len({layer.stride for g in worker.groups for layer in g.layers}) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"index_head_dim": 128}, "index"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": [8, 4]}, r"\[8, 4\] of num_key_value_heads"),
        ({"global_head_dim": 512}, "llama says global_head_dim: its layers have unlike heads"),
    ],
)
def test_configurations_that_make_no_model(change: dict[str, Any], words: str) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_size": 512,
        **change,
    }
    with raises("KVD-GEOMETRY-UNKNOWN-SHAPE", match=words):
        engine_from_config(config, Parallel(), CacheOptions(), engine_id="e")


def test_options_that_make_no_engine() -> None:
    with raises("KVD-GEOMETRY-UNEVEN", match=r"8 KV heads .* 3 ranks"):
        build("llama-3.1-8b", Parallel(tp=3))
    with raises("KVD-GEOMETRY-UNEVEN", match=r"dcp 3 .* tp 8"):
        build("deepseek-v3", Parallel(tp=8, dcp=3))
    with raises("KVD-GEOMETRY-UNKNOWN-SHAPE", match="XYZ"):
        build("llama-3.1-8b", layout="XYZ")
    with raises("KVD-GEOMETRY-UNKNOWN-SHAPE", match="int3"):
        build("llama-3.1-8b", cache_dtype="int3")
    with raises("KVD-GEOMETRY-UNKNOWN-SHAPE", match=r"32 layers .* 2 pipeline stages"):
        build("llama-3.1-8b", Parallel(pp=2, partition=(30, 3)))


@pytest.mark.parametrize("document", [None, [], {"name": "x"}, {"name": 1, "source": "s", "config": {}}])
def test_documents_that_are_no_presets(document: object) -> None:
    with pytest.raises(BadGeometry):
        preset(document)
