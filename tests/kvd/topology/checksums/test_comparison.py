"""The prefiller's sums against the decoder's: whom a worker asks for what, and what shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.checksums.comparison import Comparison, GroupResult, WantedSums, comparison
from kvd.topology.checksums.sums import ALL_TOKENS, Classes, InMemory, TokenSpan, layer_sums
from kvd.topology.compile import compile_plan
from kvd.topology.plan import plan_worker
from tests.kvd.topology.checksums.test_sums import FEWER
from tests.kvd.topology.test_oracle import _request
from tests.support import oracle
from tests.support import random_engines as engines
from tests.support.samples import engine, latent, llama


def answer(
    worker: WorkerGeometry,
    regions: tuple[NDArray[np.uint8], ...],
    blocks: oracle.Blocks,
    wanted: WantedSums,
    total: int,
) -> NDArray[np.uint64]:
    """What a prefilling worker says of its memory."""
    group = worker.groups[wanted.group]
    given_blocks = blocks[group.index]
    state = group.kind == "mamba"
    low = 0 if state else wanted.first - given_blocks.first
    ids = given_blocks.ids[low : low + wanted.blocks]
    firsts = np.arange(len(ids)) if state else (wanted.first + np.arange(len(ids))) * group.block_size
    tables = [
        layer_sums(
            layer,
            InMemory(regions),
            firsts=firsts,
            ids=ids,
            span=TokenSpan(0, 1 << 40 if state else total),
            classes=wanted.classes,
        )
        for layer in group.layers
    ]
    parts = wanted.classes.parts(wanted.classes, wanted.which)
    return np.concatenate([t[:, parts].sum(axis=(0, 1)) for t in tables] or [np.zeros(0, np.uint64)])


@dataclass
class Loaded:
    """One decoding worker after a load, and the workers that it read from."""

    against: Comparison
    memory: oracle.Memory
    answers: Mapping[int, list[NDArray[np.uint64]]]

    def results(self) -> tuple[GroupResult, ...]:
        return self.against.compare(self.against.own_sums(InMemory(self.memory.regions)), self.answers)


def load(
    local: EngineGeometry, remote: EngineGeometry, rank: int, request: oracle.Request, total: int = 0
) -> Loaded:
    total = total or request.tokens
    worker = local.workers[rank]
    plan = plan_worker(worker, local.workers, remote.workers)
    mine = oracle.memory(worker)
    written = tuple(np.zeros(len(r), np.int64) for r in mine.regions)
    against = comparison(plan, worker, remote.workers, request.local, tokens=request.tokens, total=total)
    answers = {}
    compiled = compile_plan(plan, request.local, request.remote, tokens=request.tokens)
    for at in {*compiled, *against.asks}:
        theirs = oracle.memory(remote.workers[at])
        oracle.fill(theirs, request.remote)
        if at in compiled:
            oracle._copy(compiled[at], mine, theirs, written)
        answers[at] = [
            answer(remote.workers[at], theirs.regions, request.remote, wanted, total)
            for wanted in against.asks.get(at, ())
        ]
    return Loaded(against, mine, answers)


@st.composite
def loads(draw: st.DrawFn) -> tuple[EngineGeometry, EngineGeometry, int, oracle.Request]:
    """One state a request, as vLLM has them."""
    model = draw(engines.models())
    local, remote = (engines.engine(draw, name, model, 24) for name in ("local", "remote"))
    request = _request(draw, local, remote)
    for side, geometry in ((request.local, local), (request.remote, remote)):
        for group in geometry.workers[0].groups:
            if group.kind == "mamba":
                side[group.index].ids.resize(1, refcheck=False)
    return local, remote, draw(st.integers(0, len(local.workers) - 1)), request


@pytest.mark.timeout(900)
@FEWER
@given(loads(), st.integers(0, 1 << 30))
def test_a_good_load_compares_equal_and_a_bad_one_does_not(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request], seed: int
) -> None:
    request = case[3]
    done = load(*case)
    results = done.results()
    assert [r.differs for r in results] == [""] * len(results)
    compared = {layer for part in done.against.parts for layer in [part.layer.name]}
    assert sum(r.layers for r in results) == len(compared), "all layers with a whole block are compared"
    if not done.against.parts:
        return
    part = Random(seed).choice(done.against.parts)
    fld = Random(seed).choice(part.layer.page.fields)
    where, offsets = oracle.elements(fld)
    blocks = request.local[part.group.index]
    state = part.group.kind == "mamba"
    tokens = where.get("token", np.zeros(len(offsets), np.int64))
    number = 0 if state else part.span.begin // part.group.block_size - blocks.first
    first = 0 if state else (blocks.first + number) * part.group.block_size
    inside = (first + tokens >= part.span.begin) & (first + tokens < part.span.end)
    if not inside.any():
        return
    at = part.layer.offset + int(blocks.ids[number]) * part.layer.stride + int(offsets[inside][-1])
    done.memory.regions[part.layer.region][at] ^= 1
    differs = [r.differs for r in done.results() if r.differs]
    assert differs
    assert f"layer {part.layer.name} {fld.name}" in differs[0]


# --- which blocks ---


def dense(name: str, tp: int, block: int, *, window: int | None = None) -> EngineGeometry:
    kind = "sliding_window" if window else "full"
    return engine(name, (kind, block, window, llama(("a", "b"), block=block)), tp=tp)  # type: ignore[arg-type]


def asked(
    local: EngineGeometry, remote: EngineGeometry, rank: int, first: int, count: int, tokens: int, total: int
) -> Mapping[int, tuple[WantedSums, ...]]:
    worker = local.workers[rank]
    plan = plan_worker(worker, local.workers, remote.workers)
    blocks = {0: BlockList(first, np.arange(count, dtype=np.int64))}
    return comparison(plan, worker, remote.workers, blocks, tokens=tokens, total=total).asks


def test_the_last_block_counts_where_the_whole_prompt_is_loaded() -> None:
    asks = asked(dense("d", 1, 16), dense("p", 1, 16), 0, 0, 4, 50, 50)
    assert asks == {0: (WantedSums(0, 0, 4),)}


def test_a_block_that_holds_more_than_was_loaded_is_left_out() -> None:
    asks = asked(dense("d", 1, 16), dense("p", 1, 16), 0, 0, 4, 50, 60)
    assert asks == {0: (WantedSums(0, 0, 3),)}


def test_a_block_that_begins_before_what_was_loaded_is_left_out() -> None:
    asks = asked(dense("d", 1, 16), dense("p", 1, 64), 0, 3, 9, 192, 192)
    assert asks == {0: (WantedSums(0, 1, 2),)}


def test_of_a_window_only_what_is_needed_is_asked_for() -> None:
    asks = asked(dense("d", 1, 16, window=32), dense("p", 1, 16, window=32), 0, 0, 7, 100, 100)
    assert asks == {0: (WantedSums(0, 5, 2),)}


def test_only_those_are_asked_that_were_read_from() -> None:
    assert list(asked(dense("d", 2, 16), dense("p", 4, 16), 1, 0, 4, 64, 64)) == [2, 3]


def test_nothing_is_asked_where_no_block_is_whole() -> None:
    assert asked(dense("d", 1, 16), dense("p", 1, 64), 0, 0, 2, 20, 60) == {}


def test_a_replica_is_not_asked_for_what_was_read_from_another() -> None:
    local = engine("d", ("mla", 64, None, latent(("a",))))
    remote = engine("p", ("mla", 64, None, latent(("a",))), tp=4)
    assert len(asked(local, remote, 0, 0, 1, 64, 64)) == 1


def test_answers_keep_the_tokens_of_other_ranks_apart() -> None:
    assert ALL_TOKENS.finer(Classes(1, 4)) == Classes(1, 4)
