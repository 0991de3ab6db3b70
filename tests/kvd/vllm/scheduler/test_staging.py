"""Staged engines: what is copied for peers, when, and what is never offered to them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvd.backends import memory
from kvd.backends.contract import State
from kvd.backends.errors import BackendError
from kvd.backends.staged import backend as staged
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import Descriptors
from kvd.topology.plan import plan_worker
from kvd.vllm.memory.groups import GroupFacts
from kvd.worker.orders import StageOrder, StepOrders, plain
from kvd.worker.staging import Stager, stager
from kvd.worker.streams.event import no_event
from tests.kvd.topology.test_oracle import cases
from tests.kvd.vllm.scheduler.test_pushes import BlockState, Output
from tests.support import oracle
from tests.support.rigs.dense import REQUEST, announce, dense
from tests.support.rigs.half import HYBRID, LLAMA, PREFILL_HERE, Engine, Request
from tests.support.rigs.send import Prefiller, SendRig, eventually, placed, sending, step

WINDOW = (GroupFacts("full", 4), GroupFacts("sliding_window", 4, window=4))


class Recorded(memory.MemoryBackend):
    """A backend that notes what is put out instead of copying it."""

    def __init__(self) -> None:
        super().__init__("recorded", memory.Faults())
        self.rows: list[Descriptors] = []
        self.error = ""

    def stage(self, rows: Descriptors) -> None:
        if self.error:
            raise BackendError(self.error)
        assert (rows.local == rows.remote).all()
        self.rows.append(rows)


# --- the worker ---


def covered(worker: WorkerGeometry, parts: list[Descriptors]) -> list[np.ndarray[Any, Any]]:
    """For each region, which of its bytes these rows are."""
    place = oracle.memory(worker)
    found = [np.zeros(len(region), np.bool_) for region in place.regions]
    for rows in parts:
        for address, length in zip(rows.remote.tolist(), rows.length.tolist(), strict=True):
            region, at = place.find(address, length)
            found[region][at : at + length] = True
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_every_byte_that_any_peer_reads_is_put_out(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request],
) -> None:
    local, remote, rank, request = case
    plan = plan_worker(local.workers[rank], local.workers, remote.workers)
    for position, rows in compile_plan(plan, request.local, request.remote, tokens=request.tokens).items():
        backend, source = Recorded(), remote.workers[position]
        Stager(backend, source, no_event).stage([StageOrder("r", plain(request.remote), request.tokens)])
        there, read = covered(source, backend.rows), covered(source, [rows])
        assert all((mask | ~needed).all() for mask, needed in zip(there, read, strict=True))


def test_a_hand_over_by_way_of_mirrors_gives_the_bytes_of_a_pull() -> None:
    (p, theirs), (d, mine) = placed(dense("p")), placed(dense("d"))
    backends = [staged.open_backend(name, options={"engine": "memory"}) for name in "pd"]
    for backend, engine in zip(backends, (p, d), strict=True):
        backend.register(engine.workers[0].regions)
    oracle.fill(theirs[0], REQUEST.remote)
    made = stager(backends[0], p.workers[0], no_event)
    assert made is not None
    made.stage([StageOrder("r", plain(REQUEST.remote), REQUEST.tokens)])
    for region in theirs[0].regions:
        region[:] = 0  # only the mirror has it now

    lane = backends[1].lane("p")
    lane.add("0", backends[0].metadata())
    plan = plan_worker(d.workers[0], d.workers, p.workers)
    (rows,) = compile_plan(plan, REQUEST.local, REQUEST.remote, tokens=REQUEST.tokens).values()
    transfer = lane.submit("0", rows)
    while lane.poll(transfer) is State.PENDING:
        pass

    right = oracle.memory(d.workers[0])
    oracle.fill(right, {0: BlockList(0, REQUEST.local[0].ids)})
    for found, wanted in zip(mine[0].regions, right.regions, strict=True):
        assert (found == wanted).all()
    for backend in backends:
        backend.close()


def test_nothing_is_put_out_before_the_device_has_computed_it() -> None:
    backend = Recorded()
    looks: list[int] = []

    def computed() -> bool:
        assert not backend.rows
        looks.append(len(looks))
        return len(looks) > 3

    Stager(backend, dense("p").workers[0], lambda: computed).stage(
        [StageOrder("r", plain(REQUEST.remote), 40)]
    )
    assert len(looks) == 4
    assert len(backend.rows) == 1


def test_homes_whose_memory_is_read_itself_need_no_stager() -> None:
    assert stager(memory.open_backend("m", options={}), dense("p").workers[0], no_event) is None


# --- the prefiller's scheduler ---


class Scheduler:
    """A staged prefiller's scheduler half, stepped as vLLM does."""

    def __init__(self, groups: tuple[GroupFacts, ...] = LLAMA, **more: Any) -> None:
        self.engine = Engine("p", groups, backend="staged", **more)
        self.request = self.engine.arrive(dict(PREFILL_HERE))

    def step(
        self, tokens: int, *table: list[int], preempted: AbstractSet[str] = frozenset()
    ) -> list[StageOrder]:
        if preempted:
            self.request.num_computed_tokens = 0
        scheduled = {"r": tokens} if tokens else {}
        orders = self.engine.half.step_orders(Output(scheduled, preempted, BlockState({"r": table})))
        self.request.num_computed_tokens += tokens
        return orders.stage

    def finish(self, *table: list[int]) -> bool:
        kept, params = self.engine.half.finished(self.request, table, completed=True)
        assert kept == (params is not None)
        return kept


def test_a_prompt_is_put_out_with_the_step_that_ends_it_and_offered_then() -> None:
    p = Scheduler()
    assert p.step(4, [5]) == []
    assert p.step(6, [5, 6, 7]) == [StageOrder("r", {0: (0, (5, 6, 7))}, 10)]
    assert p.step(1, [5, 6, 7]) == [], "tokens that are generated are not handed over"
    assert p.finish([5, 6, 7])


def test_a_prompt_that_was_cached_but_for_its_end_is_put_out_whole() -> None:
    p = Scheduler()
    p.request.num_computed_tokens = 9
    assert p.step(1, [5, 6, 7]) == [StageOrder("r", {0: (0, (5, 6, 7))}, 10)]


def test_a_preempted_prompt_is_put_out_again_from_its_new_blocks() -> None:
    p = Scheduler()
    p.step(10, [5, 6, 7])
    assert p.step(0, preempted={"r"}) == []
    assert p.step(10, [1, 2, 3]) == [StageOrder("r", {0: (0, (1, 2, 3))}, 10)]
    assert p.finish([1, 2, 3])


def test_a_state_is_put_out_from_the_block_it_is_in() -> None:
    p = Scheduler(HYBRID)
    assert p.step(9, [0, 4], [5, 6]) == [StageOrder("r", {0: (0, (4,)), 1: (0, (5, 6))}, 9)]
    assert p.finish([0, 4], [5, 6])


def test_blocks_that_left_a_window_since_are_not_missed() -> None:
    p = Scheduler(WINDOW)
    p.step(10, [5, 6, 7], [1, 2, 3])
    assert p.finish([5, 6, 7], [0, 0, 3])


def test_blocks_beyond_the_prompt_need_not_have_been_put_out() -> None:
    p = Scheduler()
    p.step(10, [5, 6, 7])
    assert p.finish([5, 6, 7, 8])


@pytest.mark.parametrize(
    ("groups", "put", "now"),
    [
        (LLAMA, ([5, 6, 7],), ([5, 6, 8],)),
        (HYBRID, ([0, 4], [5, 6]), ([0, 9], [5, 6])),
        (WINDOW, ([5, 6, 7], [0, 2, 3]), ([5, 6, 7], [1, 2, 3])),
    ],
    ids=["another block", "another state", "a block that was not there"],
)
def test_what_was_not_put_out_is_not_offered(
    groups: tuple[GroupFacts, ...],
    put: tuple[list[int], ...],
    now: tuple[list[int], ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    p = Scheduler(groups)
    p.step(10, *put)
    assert not p.finish(*now)
    assert "not those copied for it" in caplog.text


def test_a_request_that_was_never_computed_is_not_offered() -> None:
    assert not Scheduler().finish([5])


def test_engines_that_are_read_themselves_put_nothing_out() -> None:
    engine = Engine("p", LLAMA)
    request = engine.arrive(dict(PREFILL_HERE))
    assert isinstance(request, Request)
    output = Output({"r": 10}, frozenset(), BlockState({"r": ([5, 6, 7],)}))
    assert engine.half.step_orders(output).stage == []


# --- pushes ---


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


def recording(rig: SendRig) -> Recorded:
    """Let the prefiller be staged, over a backend that records."""
    backend, worker = Recorded(), rig.workers[0]
    worker.half.pushing._stager = Stager(backend, worker.half.geometry, no_event)
    return backend


def test_layers_are_put_out_chunk_by_chunk_before_the_decoder_hears_of_them(rig: SendRig) -> None:
    backend = recording(rig)
    told_before: list[int] = []
    stage = backend.stage

    def noting(rows: Descriptors) -> None:
        told_before.append(len(rig.progress()))
        stage(rows)

    backend.stage = noting  # type: ignore[method-assign]
    announce(rig, window=b"")

    rig.run(step(REQUEST.remote, 32, 40))
    eventually(lambda: rig.there() == {("a", 32), ("b", 32)})
    assert told_before[0] == 0
    first = sum(rows.nbytes for rows in backend.rows)
    rig.end()
    rig.run(step(REQUEST.remote, 40, 40, held=32))
    eventually(lambda: rig.there() >= {("a", 40), ("b", 40)})

    whole = covered(rig.p.workers[0], backend.rows)
    assert sum(rows.nbytes for rows in backend.rows) == first * 3 // 2, "no block goes twice"
    alone = Recorded()
    Stager(alone, rig.p.workers[0], no_event).stage([StageOrder("r", plain(REQUEST.remote), 40)])
    right = covered(rig.p.workers[0], alone.rows)
    assert all((found == wanted).all() for found, wanted in zip(whole, right, strict=True))


def test_a_push_whose_blocks_cannot_be_copied_fails_with_the_cause(rig: SendRig) -> None:
    recording(rig).error = "the device is gone"
    announce(rig, window=b"")
    rig.run(step(REQUEST.remote, 32, 40))
    (cause,) = eventually(rig.failures)
    assert "cannot be copied for the decoder: the device is gone" in cause
    assert not rig.there()


def test_a_request_preempted_while_its_blocks_are_copied_is_not_offered(rig: SendRig) -> None:
    backend = recording(rig)
    worker: Prefiller = rig.workers[0]
    again = StepOrders(pushes=[step({}, 0, 40, again=True)])
    backend.stage = lambda _rows: worker.half.pushing.begin(again)  # type: ignore[assignment,method-assign]
    announce(rig, window=b"")
    rig.run(step(REQUEST.remote, 32, 40))
    worker.half.pushing.begin(StepOrders(pushes=[step(REQUEST.remote, 0, 40)]))
    rig.end(cause="the prefiller's request was aborted")
    eventually(rig.failures)
    assert not rig.there()
