"""From the tensors that vLLM hands over to a geometry, byte for byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.geometry.errors import LayerInTwoGroups, UnknownShape
from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.errors import FieldMismatch
from kvd.topology.plan import plan_worker
from kvd.vllm.memory.groups import group_facts
from kvd.vllm.memory.tensors import Place, dtype_name, sibling_geometries, storages, worker_geometry
from tests.support.raising import raises
from tests.support.rigs.bench import (
    BF16,
    F32,
    I8,
    NUMPY,
    Dtype,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    Tensor,
    cache_config,
    dense,
    full,
    gdn,
    groups_of,
    place,
)


def tensor(dtype: Dtype, *shape: int) -> Tensor:
    return Tensor(np.zeros(int(np.prod(shape)), NUMPY[dtype]), dtype, shape, dense(shape))


def geometry(
    tensors: dict[str, Tensor], config: SimpleNamespace, where: Place | None = None
) -> WorkerGeometry:
    return worker_geometry(tensors, config, groups_of(config), where or place())


def axes(worker: WorkerGeometry, layer: str, field: str) -> dict[str, tuple[int, int, int]]:
    """(start, extent, stride) of the first axis of each label."""
    found = worker.layers[layer][1].page.by_name[field]
    return {axis.label: (axis.start, axis.extent, axis.stride) for axis in reversed(found.axes)}


def test_keys_and_values_joined_in_the_last_axis() -> None:
    made = geometry({"l0": tensor(BF16, 8, 2, 4, 8)}, cache_config(8, (full(), ("l0",))))
    layer = made.layers["l0"][1]
    assert (layer.stride, layer.page.content, made.num_blocks) == (2 * 4 * 8 * 2, 2 * 4 * 8 * 2, 8)
    assert axes(made, "l0", "k") == {"head": (0, 2, 64), "token": (0, 4, 16), "dim": (0, 4, 2)}
    assert [f.offset for f in layer.page.fields] == [0, 8]


def test_kernel_blocks_inside_a_block() -> None:
    """vLLM shows 4 tokens a kernel block where a block of the group covers 12."""
    made = geometry({"l0": tensor(BF16, 24, 2, 4, 8)}, cache_config(8, (full(block_size=12), ("l0",))))
    layer = made.layers["l0"][1]
    assert layer.stride == 3 * 128
    (outer, inner) = layer.page.by_name["k"].axes_of("token")
    assert {(a.extent, a.step, a.stride) for a in (outer, inner)} == {(3, 4, 128), (4, 1, 16)}


def test_one_rank_of_two_holds_the_second_half_of_the_heads() -> None:
    made = geometry(
        {"l0": tensor(BF16, 8, 2, 4, 8)}, cache_config(8, (full(heads=2), ("l0",))), place(1, 2, kv_heads=4)
    )
    assert axes(made, "l0", "k")["head"][:2] == (2, 2)


def test_more_ranks_than_heads_hold_the_same_one() -> None:
    config = cache_config(8, (full(heads=1), ("l0",)))
    tensors = {"l0": tensor(BF16, 8, 1, 4, 8)}
    heads = [
        axes(worker, "l0", "k")["head"][:2]
        for worker in sibling_geometries(tensors, config, groups_of(config), place(1, 4, kv_heads=2))
    ]
    assert heads == [(0, 1), (0, 1), (1, 1), (1, 1)]


def test_a_drafter_with_fewer_heads_than_its_model_is_cut_by_its_own() -> None:
    """Of 8 heads each of 8 ranks has one; so it has of 2, and four ranks in a row hold the same."""
    config = cache_config(8, (full(heads=1), ("l0", "draft")))
    tensors = {name: tensor(BF16, 8, 1, 4, 8) for name in ("l0", "draft")}
    where = place(0, 8, kv_heads=8, layer_heads={"draft": 2})
    workers = sibling_geometries(tensors, config, groups_of(config), where)
    assert [axes(worker, "l0", "k")["head"][:2] for worker in workers] == [(rank, 1) for rank in range(8)]
    assert [axes(worker, "draft", "k")["head"][:2] for worker in workers] == [(0, 1)] * 4 + [(1, 1)] * 4
    whole = cache_config(8, (full(heads=8), ("l0",)), (full(heads=2), ("draft",)))
    alone = worker_geometry(
        {"l0": tensor(BF16, 8, 8, 4, 8), "draft": tensor(BF16, 8, 2, 4, 8)},
        whole,
        groups_of(whole),
        place(0, 1, kv_heads=8, layer_heads={"draft": 2}),
    )
    assert all(plan_worker(worker, workers, [alone]).sources == (0,) for worker in workers)
    assert plan_worker(alone, [alone], workers).sources == tuple(range(8))


def test_what_a_layer_s_model_says_counts_only_where_it_fits() -> None:
    config = cache_config(8, (full(heads=3), ("l0",)))
    made = geometry({"l0": tensor(BF16, 8, 3, 4, 8)}, config, place(1, 2, kv_heads=8, layer_heads={"l0": 8}))
    assert axes(made, "l0", "k")["head"][:2] == (3, 3)


def test_context_parallel_ranks_hold_the_same_heads_of_other_tokens() -> None:
    config = cache_config(8, (full(block_size=4), ("l0",)))
    where = Place(rank=Rank(tp=1, dcp=1), tp=2, dcp=2, kv_heads=2, interleave=1)
    made = worker_geometry({"l0": tensor(BF16, 8, 2, 4, 8)}, config, group_facts(config, 2), where)
    keys = made.layers["l0"][1].page.by_name["k"]
    assert axes(made, "l0", "k")["head"][:2] == (0, 2)
    token = keys.axes_of("token")
    assert sum(a.start for a in token) == 1
    assert [(a.extent, a.step) for a in token if a.extent > 1] == [(4, 2)]
    assert made.groups[0].block_size == 8


def test_a_latent_is_the_same_on_every_rank() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576)
    config = cache_config(4, (spec, ("l0",)))
    tensors = {"l0": tensor(BF16, 4, 1, 16, 576)}
    first, second = sibling_geometries(tensors, config, groups_of(config), place(0, 2, kv_heads=1))
    assert first.layers["l0"][1].page == second.layers["l0"][1].page
    assert axes(first, "l0", "latent") == {"token": (0, 16, 1152), "dim": (0, 576, 2)}


def overlaid(spec: Any, page: int, names: tuple[str, ...] = ("s0", "a0")) -> dict[str, Tensor]:
    """A state and an attention layer that share the same bytes, block for block."""
    buffer = np.zeros(8 * page, np.int8)
    content = sum(int(np.prod(s)) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes, strict=True))
    return {
        names[0]: Tensor(buffer, I8, (8, 1, 1, content), (page, content, content, 1)),
        names[1]: Tensor(buffer, BF16, (8, 2, 4, 8), (page // 2, 32, 8, 1)),
    }


def test_a_gated_delta_net_state_overlaid_with_attention() -> None:
    state = gdn(heads=2)  # conv (3, 12) bf16 = 72 B, ssm (2, 2, 2) f32 = 32 B
    config = cache_config(8, (state, ("s0",)), (full(), ("a0",)))
    made = geometry(overlaid(state, 256), config)
    assert len(made.regions) == 1
    assert (made.regions[0].length, made.regions[0].device) == (8 * 256, "cpu")
    layer = made.layers["s0"][1]
    assert (layer.stride, layer.page.content) == (256, 72 + 32)
    assert made.layers["a0"][1].stride == 256
    assert [f.name for f in layer.page.fields] == ["conv.q", "conv.k", "conv.v", "ssm"]
    assert layer.page.by_name["ssm"].offset == 72


def test_a_state_is_sharded_over_its_heads_and_channels() -> None:
    state = gdn(heads=2)
    config = cache_config(8, (state, ("s0",)), (full(), ("a0",)))
    made = geometry(overlaid(state, 256), config, place(1, 2, kv_heads=4))
    assert axes(made, "s0", "ssm")["head"][:2] == (2, 2)
    assert axes(made, "s0", "conv.v")["channel"][:2] == (4, 4)


def test_mamba2_has_groups_of_its_own() -> None:
    state = MambaSpec(
        block_size=4,
        mamba_type=SimpleNamespace(name="MAMBA2"),
        shapes=((3, 4 * 2 + 2 * 2 * 2), (4, 2, 2)),  # x of 4 heads x 2, B and C of 2 groups x 2
        dtypes=(BF16, F32),
        num_speculative_blocks=0,
    )
    config = cache_config(8, (state, ("s0",)), (full(), ("a0",)))
    made = geometry(overlaid(state, 256), config, place(state_groups=2))
    assert [f.name for f in made.layers["s0"][1].page.fields] == ["conv.x", "conv.B", "conv.C", "ssm"]
    assert axes(made, "s0", "conv.B")["channel"][1] == 4


def state(kind: str, *shapes: tuple[int, ...]) -> MambaSpec:
    return MambaSpec(
        block_size=4,
        mamba_type=SimpleNamespace(name=kind),
        shapes=shapes,
        dtypes=(BF16, F32, I8)[: len(shapes)],
        num_speculative_blocks=0,
    )


def of_state(spec: MambaSpec, where: Place) -> WorkerGeometry:
    return geometry(overlaid(spec, 256), cache_config(8, (spec, ("s0",)), (full(), ("a0",))), where)


def test_a_short_convolution_is_sharded_over_its_channels() -> None:
    made = of_state(state("SHORT_CONV", (2, 8)), place(1, 2, kv_heads=4))
    page = made.layers["s0"][1].page
    assert ([f.name for f in page.fields], page.content) == (["conv.x"], 2 * 8 * 2)
    assert axes(made, "s0", "conv.x") == {"tap": (0, 2, 16), "channel": (8, 8, 2)}


def test_a_state_of_linear_attention_is_sharded_over_its_heads() -> None:
    made = of_state(state("LINEAR", (2, 3, 3)), place(1, 2, kv_heads=4))
    page = made.layers["s0"][1].page
    assert ([f.name for f in page.fields], page.content) == (["ssm"], 2 * 3 * 3 * 2)
    assert axes(made, "s0", "ssm") == {"head": (2, 2, 18), "row": (0, 3, 6), "state": (0, 3, 2)}


@pytest.mark.parametrize("spec", [state("CUSTOM", (3, 4)), state("GDN_ATTN", (3, 12), (2, 2, 2), (5,))])
def test_a_state_whose_parts_are_not_known_moves_whole_between_engines_of_one_size(spec: MambaSpec) -> None:
    """A record of steps that may be taken back stands behind the states that are known."""
    halves = [of_state(spec, place(rank, 2, kv_heads=4)) for rank in (0, 1)]
    page = halves[1].layers["s0"][1].page
    size = sum(int(np.prod(s)) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes, strict=True))  # type: ignore[attr-defined]
    assert ([f.name for f in page.fields], page.content) == (["state"], size)
    assert plan_worker(halves[1], halves, halves).sources == (1,)
    alone = of_state(spec, place(kv_heads=2))
    with pytest.raises(FieldMismatch, match="field state has 1 of state shards here and 2 there"):
        plan_worker(alone, [alone], halves)


def quantised(**more: Any) -> FullAttentionSpec:
    """fp8 keys and values of 4 with a float32 scale each: cells of 16 bytes."""
    return FullAttentionSpec(
        block_size=4, num_kv_heads=2, head_size=4, head_size_v=4, kv_quant_mode="fp8_per_token_head", **more
    )


def test_a_quantised_cell_moves_whole_with_its_scales() -> None:
    config = cache_config(8, (quantised(state_content_bytes=16), ("l0",)))
    made = geometry({"l0": tensor(I8, 8, 2, 4, 16)}, config, place(tp_rank=1, tp=2, kv_heads=4))
    layer = made.layers["l0"][1]
    assert [(f.name, f.dtype) for f in layer.page.fields] == [("cell", "packed fp8_per_token_head")]
    assert axes(made, "l0", "cell") == {"head": (2, 2, 64), "token": (0, 4, 16), "byte": (0, 16, 1)}
    assert layer.page.content == layer.stride == 2 * 4 * 16


def test_a_quantised_cell_of_another_size_than_the_spec_says() -> None:
    config = cache_config(8, (quantised(state_content_bytes=24), ("l0",)))
    with pytest.raises(UnknownShape, match="l0: bytes a cell is 16 in the tensor and 24 in the spec"):
        geometry({"l0": tensor(I8, 8, 2, 4, 16)}, config)


def test_heads_that_share_slots_move_with_all_of_their_worker() -> None:
    config = cache_config(8, (quantised(num_head_slots=1), ("l0",)))
    made = geometry({"l0": tensor(I8, 8, 1, 4, 32)}, config, place(tp_rank=1, tp=2, kv_heads=4))
    page = made.layers["l0"][1].page
    assert [f.dtype for f in page.fields] == ["packed fp8_per_token_head, blocks of 4 tokens"]
    assert axes(made, "l0", "block")["head shards"][:2] == (1, 1)
    assert page.content == 4 * 32


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((8, 2, 32), r"l0: a cache tensor of shape \(8, 2, 32\)"),
        ((8, 3, 4, 8), "l0: the tensor has 3 heads, the spec says 2"),
        ((8, 2, 4, 9), "l0: key and value size is 9 in the tensor and 8 in the spec"),
        ((9, 2, 4, 8), "l0: 9 kernel blocks do not make 8 blocks"),
        ((8, 2, 5, 8), "l0: tokens a block is 5"),
    ],
)
def test_tensors_that_contradict_their_spec_are_named(shape: tuple[int, ...], said: str) -> None:
    with raises("KVD-GEOMETRY-UNKNOWN-SHAPE", match=said):
        geometry({"l0": tensor(BF16, *shape)}, cache_config(8, (full(), ("l0",))))


def test_layers_that_stand_elsewhere_are_left_out() -> None:
    """Of a group's layers a pipeline stage has its own only."""
    made = geometry({"l0": tensor(BF16, 8, 2, 4, 8)}, cache_config(8, (full(), ("l0", "l1"))))
    assert list(made.layers) == ["l0"]


def test_a_layer_in_two_groups_is_an_error() -> None:
    config = cache_config(8, (full(), ("l0",)), (full(), ("l0",)))
    with pytest.raises(LayerInTwoGroups, match="layer l0 stands in group 0 and in group 1"):
        geometry({"l0": tensor(BF16, 8, 2, 4, 8)}, config)


def test_regions_are_the_distinct_allocations() -> None:
    one, two = tensor(BF16, 8, 2, 4, 8), tensor(BF16, 8, 2, 4, 8)
    assert len(storages({"a": one, "b": one, "c": two})) == 2


def test_a_dtype_has_its_plain_name() -> None:
    assert dtype_name(BF16) == "bfloat16"
