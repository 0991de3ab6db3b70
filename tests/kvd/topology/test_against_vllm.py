"""Our mapping beside the installed vLLM's own: sources of every rank, page sizes, state shapes, groups, stages.

Where both accept a combination they must agree on the data; where vLLM refuses, ours either maps or says why.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvd.geometry.families import RecurrentShape
from kvd.geometry.model import Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.paging import Paged, hybrid_block_size, page_groups, stages
from kvd.geometry.rank import Rank
from kvd.geometry.shards import Placement, Share, kv_fields, share, token_axes
from kvd.geometry.states import StateFamily, StateShape, state_fields
from kvd.topology.plan import plan_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # importing vLLM takes its time

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 96, 128)


class Vllm(NamedTuple):
    """The modules under comparison."""

    utils: Any
    mapping: Any
    interface: Any
    states: Any
    cache: Any
    distributed: Any
    torch: Any


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    pytest.importorskip("vllm", reason="vLLM is not installed: nothing to compare with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from vllm.distributed import utils as distributed
        from vllm.distributed.kv_transfer.kv_connector import utils
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import tp_mapping
        from vllm.model_executor.layers.mamba import mamba_utils
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils

        yield Vllm(utils, tp_mapping, kv_cache_interface, mamba_utils, kv_cache_utils, distributed, torch)


def workers(heads: int, tp: int) -> tuple[WorkerGeometry, ...]:
    """Engines of one layer of ``heads`` heads of one element, one token a block."""
    made = []
    for rank in range(tp):
        part = share("heads", heads, rank, tp)
        page = Page(2 * part.extent, attention(part))
        layers = (Layer("l", page, 0, 0, page.size),)
        made.append(WorkerGeometry(Rank(tp=rank), 1, (Region(0, page.size),), (Group(0, "full", 1, layers),)))
    return tuple(made)


def attention(part: Share) -> tuple[Any, ...]:
    return kv_fields(
        dtype="x",
        itemsize=1,
        heads=part,
        tokens=token_axes(kernel_blocks=1, kernel_tokens=1, kernel_stride=0, token_stride=1),
        block_tokens=1,
        key_size=1,
        value_size=1,
        place=Placement(2, 1, 0, 1),
    )


def even(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


@pytest.mark.parametrize("heads", HEADS)
def test_heads_come_from_ranks_that_hold_them(vllm: Vllm, heads: int) -> None:
    compared = 0
    for local_tp, remote_tp in itertools.product(SIZES, SIZES):
        if not (even(heads, local_tp) and even(heads, remote_tp)):
            continue
        mine, theirs = workers(heads, local_tp), workers(heads, remote_tp)
        for rank in range(local_tp):
            topology = vllm.utils.TransferTopology(
                tp_rank=rank,
                tp_size=local_tp,
                block_size=1,
                engine_id="d",
                is_mla=False,
                is_mamba=False,
                total_num_kv_heads=heads,
                attn_backends=[],
            )
            plan = plan_worker(mine[rank], mine, theirs)
            need = set(range(share("heads", heads, rank, local_tp).start, end(heads, rank, local_tp)))
            assert {h for r in plan.reads for h in range(*(r.heads or (0, 0)))} == need
            try:
                upstream = vllm.mapping.compute_tp_mapping(
                    topology, remote_tp, (vllm.interface.FullAttentionSpec,)
                )
                topology.handshake_target_ranks(remote_tp)
            except AssertionError:
                continue  # sizes that do not divide each other: ours maps what vLLM refuses
            held = {
                h
                for source in upstream.source_ranks_per_group[0]
                for h in range(share("heads", heads, source, remote_tp).start, end(heads, source, remote_tp))
            }
            assert need <= held
            assert {h for i in plan.sources for h in range(*heads_of(theirs[i]))} <= held
            compared += 1
    assert compared


def test_sizes_that_vllm_refuses_are_mapped(vllm: Vllm) -> None:
    """Every pair of sizes up to 16 that can hold 1 to 128 heads at all; docs/geometry.md states the figures."""
    pairs, refused = 0, 0
    for heads in range(1, 129):
        fitting = [tp for tp in range(1, 17) if even(heads, tp)]
        for local_tp, remote_tp in itertools.product(fitting, fitting):
            pairs += 1
            topology = vllm.utils.TransferTopology(0, local_tp, 1, "d", False, False, heads, [])
            try:
                topology.handshake_target_ranks(remote_tp)
            except AssertionError:
                refused += 1
                mine = workers(heads, local_tp)
                plan = plan_worker(mine[-1], mine, workers(heads, remote_tp))
                assert sum(r.layer_bytes for r in plan.reads) == mine[-1].groups[0].layers[0].page.content
    assert (pairs, refused) == (2419, 704)


def end(heads: int, rank: int, tp: int) -> int:
    part = share("heads", heads, rank, tp)
    return part.start + part.extent


def heads_of(worker: WorkerGeometry) -> tuple[int, int]:
    axis = worker.groups[0].layers[0].page.by_name["k"].axes_of("head")[0]
    return axis.start, axis.start + axis.extent


@pytest.mark.parametrize("local_tp", SIZES)
def test_latents_are_spread_no_worse(vllm: Vllm, local_tp: int) -> None:
    """vLLM takes one rank a reader for MLA; ours must not load any rank with more layers than that does."""
    for remote_tp in SIZES:
        if local_tp % remote_tp and remote_tp % local_tp:
            continue
        mine, theirs = workers(1, local_tp), workers(1, remote_tp)
        loads = [0] * remote_tp
        upstream = [0] * remote_tp
        for rank in range(local_tp):
            topology = vllm.utils.TransferTopology(rank, local_tp, 1, "d", True, False, 1, [])
            made = vllm.mapping.compute_tp_mapping(topology, remote_tp, (vllm.interface.MLAAttentionSpec,))
            for source in made.source_ranks_per_group[0]:
                upstream[source] += 1
            for i in plan_worker(mine[rank], mine, theirs).sources:
                loads[i] += 1
        assert max(loads) <= max(upstream)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2, 8, 32])
def test_attention_pages_have_the_same_bytes(vllm: Vllm, heads: int, tp: int) -> None:
    part = share("heads", heads, 0, tp)
    spec = vllm.interface.FullAttentionSpec(
        block_size=1, num_kv_heads=part.extent, head_size=1, dtype=vllm.torch.int8
    )
    assert spec.page_size_bytes == sum(f.nbytes for f in attention(part))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("spec_tokens", [0, 2])
@pytest.mark.parametrize(("family", "groups"), [("mamba2", 1), ("mamba2", 8), ("gdn", 16), ("mamba1", 1)])
def test_states_have_the_shapes_of_vllm(
    vllm: Vllm, family: StateFamily, groups: int, spec_tokens: int, tp: int
) -> None:
    shape = RecurrentShape(family, 32, 64, 128, groups, 4)
    calculate = vllm.states.MambaStateShapeCalculator
    if family == "mamba2":
        conv, ssm = calculate.mamba2_state_shape(tp, 32 * 64, groups, 32, 64, 128, 4, num_spec=spec_tokens)
    elif family == "gdn":
        conv, ssm = calculate.gated_delta_net_state_shape(tp, groups, 32, 128, 64, 4, spec_tokens)
    else:
        conv, ssm = calculate.mamba1_state_shape(tp, 32 * 64, 16, 4)
    heads = 32 * 64 if family == "mamba1" else shape.heads
    for rank in range(tp):
        # A shape of one rank must come apart into sections that add up to it, without gap or overlap.
        live = StateShape(
            family,
            (conv[::-1] if family == "mamba1" else conv, "bfloat16", 2),
            (ssm, "float32", 4),
            heads,
            groups,
        )
        fields = state_fields(live, rank, tp)
        assert sum(f.nbytes for f in fields if f.name != "ssm") == 2 * conv[0] * conv[1]
        assert sum(f.nbytes for f in fields if f.name == "ssm") == 4 * int(np.prod(ssm))


def test_stages_are_those_of_vllm(vllm: Vllm) -> None:
    for depth, pp in itertools.product((12, 13, 61, 80, 94), (1, 2, 3, 4, 8)):
        theirs = [vllm.distributed.get_pp_indices(depth, rank, pp) for rank in range(pp)]
        assert [(s.start, s.stop) for s in stages(depth, pp)] == theirs


@pytest.mark.parametrize(
    ("full", "windowed"), [(10, 52), (18, 18), (12, 13), (4, 36), (5, 24), (2, 3), (12, 36)]
)
def test_groups_are_those_of_vllm(vllm: Vllm, full: int, windowed: int) -> None:
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": vllm.torch.int8}
    every = (full + windowed) // full
    specs: dict[str, Any] = {}
    for i in range(full + windowed):
        is_full = i % every == every - 1 and sum(n.startswith("f") for n in specs) < full
        kind = vllm.interface.FullAttentionSpec if is_full else vllm.interface.SlidingWindowSpec
        extra = {} if is_full else {"sliding_window": 64}
        specs[f"{'f' if is_full else 's'}{i}"] = kind(**common, **extra)
    theirs = vllm.cache._get_kv_cache_groups_uniform_page_size(specs)
    ours = page_groups([Paged(name, name[0], token_bytes=16) for name in specs], 16)
    assert [tuple(g.layer_names) for g in theirs] == [g.layers for g in ours]


@pytest.mark.parametrize("state", [268_288, 274_432, 1_081_344, 65_536, 1])
@pytest.mark.parametrize("token", [512, 1024, 2048])
@pytest.mark.parametrize(("block", "kernel"), [(16, 16), (128, 32), (64, 64)])
def test_block_sizes_of_hybrids_are_those_of_vllm(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, state: int, token: int, block: int, kernel: int
) -> None:
    """The platform's own method, on a configuration that holds nothing but what it reads."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    backend = SimpleNamespace(
        get_supported_kernel_block_sizes=lambda: [MultipleOf(kernel)], customize_spec=lambda spec: spec
    )
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: ((state,),),
        get_mamba_state_dtype_from_config=lambda _: (vllm.torch.int8,),
    )
    monkeypatch.setattr(type(ModelRegistry), "resolve_model_cls", lambda *_, **__: (model, ""))
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", classmethod(lambda *_: [backend]))
    cache = SimpleNamespace(
        cache_dtype="auto", block_size=block, mamba_cache_mode="none", mamba_page_size_padded=None
    )
    config = SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            dtype=vllm.torch.int8,
            use_mla=False,
            architecture="x",
            get_num_kv_heads=lambda _: 1,
            get_head_size=lambda: token // 2,
        ),
        parallel_config=None,
    )
    monkeypatch.setattr("vllm.config.vllm.set_current_vllm_config", lambda _: nullcontext())
    Platform._align_hybrid_block_size(config, backend)
    ours = hybrid_block_size(block_size=block, kernel_block=kernel, token_bytes=token, state_bytes=state)
    assert cache.block_size == ours
    assert (cache.mamba_page_size_padded or state) == ours * token
