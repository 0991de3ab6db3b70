"""What cannot be mapped is a typed error that names both values: never an assertion, never a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvd.geometry.model import EngineGeometry, Field, WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.effort import refuse_large
from kvd.topology.errors import (
    BlockMismatch,
    FieldMismatch,
    LayerMissing,
    NotCovered,
    TopologyError,
)
from kvd.topology.plan import Plan, plan_worker
from tests.support.raising import raises
from tests.support.samples import NUM_BLOCKS, engine, gated_delta_net, llama

ONE = ("layers.0",)


def plan(local: EngineGeometry, remote: tuple[WorkerGeometry, ...]) -> Plan:
    return plan_worker(local.workers[0], local.workers, remote)


def with_fields(worker: WorkerGeometry, change: Callable[[Field], Field]) -> WorkerGeometry:
    """The worker with every field of its pages changed."""
    groups = tuple(
        replace(
            g,
            layers=tuple(
                replace(x, page=replace(x.page, fields=tuple(change(f) for f in x.page.fields)))
                for x in g.layers
            ),
        )
        for g in worker.groups
    )
    return replace(worker, groups=groups)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: replace(f, dtype="float16"), ("bfloat16", "float16")),
        (lambda f: replace(f, itemsize=4), ("2 bytes", "4 bytes")),
        (lambda f: replace(f, name=f"{f.name}q"), ("k, v", "kq, vq")),
        (lambda f: replace(f, shape=(("head", 12), *f.shape[1:])), ("8 of head", "12 there")),
        (lambda f: replace(f, shape=(*f.shape[:2], ("dim", 64))), ("128 of dim", "64 there")),
    ],
)
def test_fields_that_differ(change: Callable[[Field], Field], words: tuple[str, ...]) -> None:
    local, remote = (engine(name, ("full", 16, None, llama(ONE))) for name in "dp")
    with pytest.raises(FieldMismatch) as found:
        plan(local, tuple(with_fields(w, change) for w in remote.workers))
    assert all(word in str(found.value) for word in words)


def test_a_field_that_only_the_remote_side_has() -> None:
    # Scales, for instance: bytes without them would be read as something else.
    local, remote = (engine(name, ("full", 16, None, llama(ONE))) for name in "dp")
    with pytest.raises(FieldMismatch, match=r"k, v here and k, v, k\.scale there"):
        plan(local, tuple(_scaled(w) for w in remote.workers))


def _scaled(worker: WorkerGeometry) -> WorkerGeometry:
    group = worker.groups[0]
    layer = group.layers[0]
    fields = (*layer.page.fields, replace(layer.page.fields[0], name="k.scale"))
    page = replace(layer.page, fields=fields)
    return replace(worker, groups=(replace(group, layers=(replace(layer, page=page),)),))


def test_a_rank_that_is_missing() -> None:
    local = engine("d", ("full", 16, None, llama(ONE)))
    remote = engine("p", ("full", 16, None, llama(ONE)), tp=4)
    with raises("KVD-TOPOLOGY-NOT-COVERED", match=r"field k: .* head 2\.\.3"):
        plan(local, (remote.workers[0], *remote.workers[2:]))


def test_engines_that_nobody_could_compare_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    local = engine("d", ("full", 16, None, llama(ONE)))
    refuse_large(local, local)
    monkeypatch.setattr("kvd.topology.effort.MAX_LAYERS", 0)
    with raises(
        "KVD-TOPOLOGY-TOO-MUCH", match=r"engine d: layers of all its workers: 1; at most 0 are compared"
    ):
        refuse_large(local, local)


def test_a_layer_that_is_missing() -> None:
    local = engine("d", ("full", 16, None, llama(("layers.0", "layers.7"))))
    remote = engine("p", ("full", 16, None, llama(ONE)))
    with raises("KVD-TOPOLOGY-LAYER", match=r"layers\.7"):
        plan(local, remote.workers)


def test_states_of_unlike_length() -> None:
    def longer(fld: Field) -> Field:
        return replace(fld, shape=(("tap", 5), *fld.shape[1:])) if fld.name != "ssm" else fld

    local, remote = (engine(name, ("mamba", 640, None, gated_delta_net(ONE))) for name in "dp")
    with pytest.raises(FieldMismatch, match="3 of tap here and 5 there"):
        plan(local, tuple(with_fields(w, longer) for w in remote.workers))


def test_workers_that_disagree_about_a_group() -> None:
    local = engine("d", ("full", 16, None, llama(ONE)))
    first = engine("p", ("full", 16, None, llama(ONE)), tp=2).workers[0]
    second = engine("p", ("full", 32, None, llama(ONE, block=32)), tp=2).workers[1]
    with pytest.raises(BlockMismatch, match="16 tokens on tp0 and of 32 on tp1"):
        plan(local, (first, second))


def blocks(*ids: int, first: int = 0) -> BlockList:
    return BlockList(first, np.array(ids, np.int64))


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (blocks(1, 2, 3), blocks(1, 2), r"0\.\.2 .* 0\.\.1"),
        (blocks(1, 2, 3), blocks(1, 2, first=1), r"0\.\.2 .* 1\.\.2"),
        (blocks(1, 2, 1), blocks(1, 2, 3), "1 is given 2 times"),
        (blocks(3, 2, 2), blocks(1, 2, 3), "2 is given 2 times"),
        (blocks(5, 5, 5), blocks(1, 2, 3), "5 is given 3 times"),
        (blocks(1, 2, NUM_BLOCKS), blocks(1, 2, 3), f"local .* 1..{NUM_BLOCKS} and only {NUM_BLOCKS}"),
        (blocks(NUM_BLOCKS, 2, 1), blocks(1, 2, 3), f"local .* 1..{NUM_BLOCKS} and only {NUM_BLOCKS}"),
        (blocks(1, -1, 3), blocks(1, 2, 3), "local .* -1"),
        (blocks(1, 2, 3), blocks(1, 2, -1), "remote .* -1"),
        (blocks(1, 2, 3), blocks(1, NUM_BLOCKS, 2), f"remote .* 1..{NUM_BLOCKS} and only {NUM_BLOCKS}"),
    ],
)
def test_blocks_that_do_not_fit(mine: BlockList, theirs: BlockList, words: str) -> None:
    local, remote = (engine(name, ("full", 16, None, llama(ONE))) for name in "dp")
    with pytest.raises(BlockMismatch, match=words):
        compile_plan(plan(local, remote.workers), {0: mine}, {0: theirs}, tokens=48)


def test_blocks_of_a_group_that_were_not_given() -> None:
    local, remote = (engine(name, ("full", 16, None, llama(ONE))) for name in "dp")
    with pytest.raises(BlockMismatch, match="remote group 0"):
        compile_plan(plan(local, remote.workers), {0: blocks(1)}, {}, tokens=16)


def test_unequal_numbers_of_states() -> None:
    local, remote = (engine(name, ("mamba", 640, None, gated_delta_net(ONE))) for name in "dp")
    with pytest.raises(BlockMismatch, match="1 local blocks and 2 remote"):
        compile_plan(plan(local, remote.workers), {0: blocks(1)}, {0: blocks(1, 2)}, tokens=16)


def test_only_blocks_before_the_window_may_be_missing() -> None:
    local, remote = (engine(name, ("sliding_window", 16, 32, llama(ONE))) for name in "dp")
    made = plan(local, remote.workers)
    mine = blocks(1, 2, 3, 4, 5)
    found = compile_plan(made, {0: mine}, {0: blocks(7, 8, first=3)}, tokens=80)
    assert found[0].nbytes == 2 * 8 * 16 * 512
    with pytest.raises(BlockMismatch, match=r"3\.\.4"):
        compile_plan(made, {0: mine}, {0: blocks(8, first=4)}, tokens=80)


def test_layers_that_share_a_cache_move_once() -> None:
    def shared(e: EngineGeometry) -> EngineGeometry:
        worker = e.workers[0]
        group = worker.groups[0]
        twin = replace(group.layers[0], name="layers.9")
        return replace(e, workers=(replace(worker, groups=(replace(group, layers=(*group.layers, twin)),)),))

    local, remote = (shared(engine(name, ("full", 16, None, llama(ONE)))) for name in "dp")
    found = compile_plan(plan(local, remote.workers), {0: blocks(1)}, {0: blocks(2)}, tokens=16)
    assert found[0].nbytes == 8 * 16 * 512


def test_every_refusal_is_a_topology_error() -> None:
    assert all(issubclass(e, TopologyError) for e in (BlockMismatch, FieldMismatch, LayerMissing, NotCovered))
