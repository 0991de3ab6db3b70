"""Push writes what pull reads: over random pairs of engines and chunks, every byte of the decoder once and no other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.copies import compile_blocks
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.errors import BlockMismatch, UnknownEngine
from kvd.topology.plan import plan_layers, plan_part, plan_worker
from kvd.topology.push import (
    LayerPush,
    chunk_of_target,
    compile_chunk,
    in_window,
    plan_push,
    sendable,
)
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle, samples

Case = tuple[EngineGeometry, EngineGeometry, int, oracle.Request]


def computed_so_far(request: oracle.Request, sizes: dict[int, int], reached: int) -> dict[int, BlockList]:
    """The prefiller's blocks as its table has them when so many tokens are computed."""
    return {
        g: BlockList(b.first, b.ids[: max(0, -(-reached // sizes[g]) - b.first)] if sizes[g] else b.ids)
        for g, b in request.remote.items()
    }


def push_in_chunks(case: Case, steps: list[list[int]]) -> dict[int, list[Descriptors]]:
    """All writes to the decoding worker by position of the prefilling one; ``steps`` are cycled over the layers."""
    local, remote, rank, request = case
    sizes = {g.index: 0 if g.kind == "mamba" else g.block_size for g in remote.workers[0].groups}
    written: dict[int, list[Descriptors]] = {}
    for position, worker in enumerate(remote.workers):
        pushes = plan_push(local.workers[rank], local.workers, remote.workers, worker.rank)
        for number, push in enumerate(pushes.values()):
            sent = 0
            for reached in steps[number % len(steps)]:
                due = sendable(push, reached=reached, total=request.tokens)
                assert sent <= due <= reached
                written.setdefault(position, []).append(
                    compile_chunk(
                        push,
                        computed_so_far(request, sizes, reached),
                        request.local,
                        total=request.tokens,
                        first=sent,
                        last=due,
                    )
                )
                sent = due
    return written


def cells(rows: Descriptors) -> Counter[tuple[int, int]]:
    """(target byte, source byte) of everything that is copied."""
    starts = zip(rows.local.tolist(), rows.remote.tolist(), rows.length.tolist(), strict=True)
    return Counter((mine + i, theirs + i) for mine, theirs, n in starts for i in range(n))


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Case, list[list[int]]]:
    case = draw(cases())
    tokens = case[3].tokens
    reached = st.lists(st.integers(0, tokens), max_size=4).map(lambda steps: [*sorted(steps), tokens])
    return case, draw(st.lists(reached, min_size=1, max_size=3))


@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(chunked())
def test_chunks_of_layers_write_every_byte_that_pull_reads_once(made: tuple[Case, list[list[int]]]) -> None:
    case, steps = made
    local, remote, rank, request = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    pulled = compile_plan(plan, request.local, request.remote, tokens=request.tokens)
    pushed = push_in_chunks(case, steps)
    for position in pulled.keys() | pushed.keys():
        writes = concatenate(pushed.get(position, []))
        swapped = Descriptors(writes.remote, writes.local, writes.length)
        assert cells(swapped) == cells(pulled.get(position, concatenate([])))


@settings(THOROUGH, max_examples=min(200, THOROUGH.max_examples))
@given(chunked())
def test_chunks_of_whole_groups_read_every_byte_that_pull_reads_once(
    made: tuple[Case, list[list[int]]],
) -> None:
    (local, remote, rank, request), steps = made
    sizes = {g.index: 0 if g.kind == "mamba" else g.block_size for g in remote.workers[0].groups}
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    pushes = [
        push
        for worker in remote.workers
        for push in plan_push(local.workers[rank], local.workers, remote.workers, worker.rank).values()
    ]
    of_group = {push.group: push for push in pushes}
    assume(all(push.source_group == of_group[push.group].source_group for push in pushes))
    read: dict[int, list[Descriptors]] = {}
    sent = dict.fromkeys(of_group, 0)
    for reached in steps[0]:
        mine: dict[int, BlockList] = {}
        theirs: dict[int, BlockList] = {}
        computed = computed_so_far(request, sizes, reached)
        for group, push in of_group.items():
            due = sendable(push, reached=reached, total=request.tokens)
            if due > sent[group] and group in request.local:
                mine[group] = chunk_of_target(push, request.local[group], first=sent[group], last=due)
                theirs[push.source_group] = in_window(push, computed[push.source_group], total=request.tokens)
            sent[group] = due
        for position, copies in compile_blocks(plan, mine, theirs, tokens=request.tokens).items():
            picked = copies.selection.descriptors() if copies.selection else concatenate([])
            read.setdefault(position, []).append(concatenate([copies.descriptors, picked]))
    pulled = compile_plan(plan, request.local, request.remote, tokens=request.tokens)
    for position in pulled.keys() | read.keys():
        found, wanted = concatenate(read.get(position, [])), pulled.get(position, concatenate([]))
        assert cells(found) == cells(wanted)


@settings(THOROUGH, max_examples=min(100, THOROUGH.max_examples))
@given(chunked())
def test_what_was_pushed_is_right_by_the_oracle(made: tuple[Case, list[list[int]]]) -> None:
    case, steps = made
    local, remote, rank, request = case
    mine = oracle.memory(local.workers[rank])
    written = tuple(np.zeros(len(r), np.int64) for r in mine.regions)
    for position, parts in push_in_chunks(case, steps).items():
        theirs = oracle.memory(remote.workers[position])
        oracle.fill(theirs, request.remote)
        for part in parts:
            oracle._copy(Descriptors(part.remote, part.local, part.length), mine, theirs, written)
    oracle._compare(mine, written, request)


@settings(THOROUGH, max_examples=min(100, THOROUGH.max_examples))
@given(cases())
def test_layers_have_the_sources_that_the_whole_plan_has(case: Case) -> None:
    local, remote, rank, _ = case
    arguments = (local.workers[rank], local.workers, remote.workers)
    whole, by_layer = plan_worker(*arguments), plan_layers(*arguments)
    expected = Counter((r.remote, r.group, layer) for r in whole.reads for layer in r.layers)
    assert expected == Counter(
        (r.remote, r.group, layer) for plan in by_layer.values() for r in plan.reads for layer in r.layers
    )
    assert all(set(r.layers) == {name} for name, plan in by_layer.items() for r in plan.reads)


@settings(THOROUGH, max_examples=min(100, THOROUGH.max_examples))
@given(cases(), st.integers(0, 3))
def test_plans_of_some_layers_of_one_source_each_read_together_what_the_whole_plan_reads(
    case: Case, bits: int
) -> None:
    local, remote, rank, request = case
    target = local.workers[rank]
    mine = oracle.memory(target)
    written = tuple(np.zeros(len(r), np.int64) for r in mine.regions)
    names = list(target.layers)
    parts = [{name for number, name in enumerate(names) if (number ^ bits) & 1 == odd} for odd in (0, 1)]
    for position, worker in enumerate(remote.workers):
        theirs = oracle.memory(worker)
        oracle.fill(theirs, request.remote)
        for layers in parts:
            plan = plan_part(target, local.workers, remote.workers, frozenset(layers), worker.rank)
            assert {r.remote for r in plan.reads} <= {position}
            for rows in compile_plan(plan, request.local, request.remote, tokens=request.tokens).values():
                oracle._copy(rows, mine, theirs, written)
    oracle._compare(mine, written, request)


def dense(name: str, block: int) -> EngineGeometry:
    return samples.engine(name, ("full", block, None, samples.llama(("a", "b"), block=block)))


def windowed(name: str, block: int, window: int) -> EngineGeometry:
    return samples.engine(name, ("sliding_window", block, window, samples.llama(("a",), block=block)))


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@settings(THOROUGH, max_examples=min(100, THOROUGH.max_examples))
@given(cases())
def test_a_worker_that_knows_its_own_pipeline_stage_writes_what_it_would_if_it_knew_all(case: Case) -> None:
    local, remote, rank, _ = case
    for worker in remote.workers:
        stage = [other for other in remote.workers if other.rank.pp == worker.rank.pp]
        known, all_of_it = (
            plan_push(local.workers[rank], local.workers, sources, worker.rank)
            for sources in (stage, remote.workers)
        )
        assert list(known) == list(all_of_it)
        assert [rows(push) for push in known.values()] == [rows(push) for push in all_of_it.values()]


def rows(push: LayerPush) -> list[list[int]]:
    """What is copied of block 0, column by column."""
    found = concatenate([read.rows for read in push.plan.reads])
    return [column.tolist() for column in (found.local, found.remote, found.length)]


def test_chunks_end_where_blocks_of_both_sides_end() -> None:
    d, p = dense("d", 16), dense("p", 24)
    push = plan_push(d.workers[0], d.workers, p.workers, Rank())["b"]
    assert push.unit == 48
    assert [sendable(push, reached=n, total=100) for n in (0, 47, 48, 95, 96, 99, 100)] == [
        0,
        0,
        48,
        48,
        96,
        96,
        100,
    ]


def test_a_state_is_sent_once_and_last() -> None:
    d, p = (samples.engine(name, ("mamba", 16, None, samples.gated_delta_net(("m",)))) for name in ("d", "p"))
    push = plan_push(d.workers[0], d.workers, p.workers, Rank())["m"]
    assert [sendable(push, reached=n, total=100) for n in (16, 99, 100)] == [0, 0, 100]
    source, target = {0: BlockList(0, ids(3))}, {0: BlockList(0, ids(5))}
    assert not len(compile_chunk(push, source, target, total=100, first=0, last=96))
    assert compile_chunk(push, source, target, total=100, first=0, last=100).nbytes == sum(
        f.nbytes for f in d.workers[0].layers["m"][1].page.fields
    )


def test_what_the_decoder_has_already_is_not_sent() -> None:
    d, p = dense("d", 16), dense("p", 16)
    push = plan_push(d.workers[0], d.workers, p.workers, Rank())["a"]
    source, target = {0: BlockList(0, ids(1, 2, 3))}, {0: BlockList(2, ids(9))}
    assert not len(compile_chunk(push, source, target, total=48, first=0, last=32))
    assert len(compile_chunk(push, source, target, total=48, first=32, last=48)) > 0


def test_blocks_that_leave_the_window_before_the_end_are_never_sent() -> None:
    d, p = windowed("d", 16, 20), windowed("p", 16, 20)
    push = plan_push(d.workers[0], d.workers, p.workers, Rank())["a"]
    source, target = {0: BlockList(0, ids(1, 2, 3, 4))}, {0: BlockList(0, ids(6, 7, 8, 9))}
    early = compile_chunk(push, source, target, total=64, first=0, last=32)
    late = compile_chunk(push, source, target, total=64, first=32, last=64)
    assert not len(early)
    assert late.nbytes == 2 * d.workers[0].layers["a"][1].page.content


def test_a_needed_block_that_the_prefiller_let_go_of_is_an_error() -> None:
    d, p = windowed("d", 16, 20), windowed("p", 16, 20)
    push = plan_push(d.workers[0], d.workers, p.workers, Rank())["a"]
    with pytest.raises(BlockMismatch, match=r"remote blocks 2\.\.3 of 16 tokens, and 3\.\.3 were given"):
        compile_chunk(
            push, {0: BlockList(3, ids(4))}, {0: BlockList(2, ids(8, 9))}, total=64, first=0, last=64
        )


def test_a_replica_that_supplies_nothing_has_nothing_to_push() -> None:
    one = samples.engine("d", ("mla", 64, None, samples.latent(("a",))))
    two = samples.engine("p", ("mla", 64, None, samples.latent(("a",))), tp=2)
    found = [plan_push(one.workers[0], one.workers, two.workers, Rank(tp=tp)) for tp in (0, 1)]
    assert sorted(len(pushes) for pushes in found) == [0, 1]


def test_a_source_that_the_engine_does_not_have_is_named() -> None:
    d = dense("d", 16)
    with pytest.raises(UnknownEngine, match="tp3 among the 1"):
        plan_push(d.workers[0], d.workers, d.workers, Rank(tp=3))
