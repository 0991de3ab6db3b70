"""Operators' orders at the scheduler: what is planned, what is refused, which loads miss, and how each is followed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.geometry.rank import Rank
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.wire.frame import Message
from kvd.wire.identity import EngineFacts
from kvd.wire.order import (
    AllWaiting,
    Asker,
    ClearForced,
    ForcedCleared,
    ForceMiss,
    ForcePlan,
    LoadPart,
    Miss,
    NextLoads,
    OneRequest,
    OrderState,
    ReportForced,
)
from kvd.wire.reply import Refused
from kvd.worker.cause import Cause
from kvd.worker.orders import Fault, LoadOrder, StepOutcomes
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import Script, why
from tests.support.rigs.half import HYBRID, LLAMA, Engine, Request, from_prefiller

ASKER = Asker(order_id="o1", uid=1000, pid=77)
CAUSE = "forced by uid 1000, pid 77, order o1"
FORCED = Cause(CAUSE, "FORCED")


def order(target: Any, *, carry_out: bool = True, **more: Any) -> ForceMiss:
    return ForceMiss(engine_id="d", target=target, carry_out=carry_out, asker=ASKER, **more)


def given(engine: Engine, message: Message) -> ForcePlan:
    answer = engine.script.push(message)
    assert isinstance(answer, ForcePlan), answer
    return answer


def refused(engine: Engine, message: Message) -> str:
    answer = engine.script.push(message)
    assert isinstance(answer, Refused), answer
    return answer.code


def waiting(engine: Engine, request_id: str = "r") -> Request:
    """A request that may be loaded as soon as there are blocks for it."""
    request = engine.arrive(from_prefiller(), request_id)
    engine.answer()
    engine.half.matched_tokens(request, 0)
    return request


def allocate(engine: Engine, request: Request, tokens: int = 10) -> LoadOrder:
    groups = len(engine.half.groups)
    engine.half.allocated(request, tuple([1, 2, 3] for _ in range(groups)), tokens)
    (made,) = engine.half.step_orders().loads
    return made


def missed(engine: Engine, request: Request, cause: str = CAUSE) -> None:
    """The workers report the load as failed."""
    outcomes = StepOutcomes({request.request_id: why(cause)}, {request.request_id: 0.0})
    engine.half.loads_ended({request.request_id}, outcomes)


def step(engine: Engine, **tokens: int) -> Any:
    return engine.half.step_orders(
        SimpleNamespace(num_scheduled_tokens=tokens, preempted_req_ids=None, kv_connector_block_state=None)
    )


def misses(engine: Engine) -> list[Miss]:
    return [report.miss for report in engine.script.told(ReportForced) if report.miss is not None]


def state(engine: Engine) -> OrderState:
    return engine.script.told(ReportForced)[-1].order


def test_a_plan_says_what_would_be_recomputed_and_by_which_channel_and_changes_nothing() -> None:
    engine = Engine("d")
    request = waiting(engine)
    plan = given(engine, order(OneRequest("r"), carry_out=False))
    assert (plan.policy, plan.mode, plan.groups, plan.channel) == ("recompute", "pull", 1, "blocks")
    (planned,) = plan.requests
    assert (planned.request_id, planned.prefiller, planned.loading) == ("r", "p", False)
    assert (planned.tokens, planned.keeps, planned.recomputes) == (10, 0, 10)
    assert allocate(engine, request).fault is None
    assert engine.script.told(ReportForced) == []


def test_with_one_group_the_prefix_that_is_computed_here_is_kept_with_several_nothing_is() -> None:
    for groups, keeps, channel in ((LLAMA, 4, "blocks"), (HYBRID, 0, "request")):
        engine = Engine("d", groups)
        params = from_prefiller(9 if groups is HYBRID else 10, tuple((5, 6, 7) for _ in groups))
        request = engine.arrive(params)
        engine.answer()
        assert engine.half.matched_tokens(request, 4)[1]
        plan = given(engine, order(AllWaiting(), carry_out=False))
        assert (plan.requests[0].keeps, plan.channel) == (keeps, channel)


@pytest.mark.parametrize("name", ["r-0123abcd", "r", "p-1"])
def test_a_request_goes_by_its_id_without_what_vllm_adds_or_by_its_prefills(name: str) -> None:
    engine = Engine("d")
    waiting(engine, "r-0123abcd")
    assert given(engine, order(OneRequest(name))).requests[0].request_id == "r-0123abcd"


def test_what_cannot_recover_or_is_not_there_is_refused() -> None:
    strict = Engine("d", policy="fail")
    waiting(strict)
    assert refused(strict, order(OneRequest("r"))) == "KVD-FORCE-POLICY"
    prefiller = SchedulerHalf(
        ConnectorSettings(),
        EngineFacts(engine_id="p", model="m", role="prefill"),
        LLAMA,
        "recompute",
        Script().open,
    )
    answer = prefiller._on_message(order(NextLoads()))
    assert isinstance(answer, Refused)
    assert answer.code == "KVD-FORCE-ROLE"
    engine = Engine("d")
    assert refused(engine, order(OneRequest("r"))) == "KVD-FORCE-UNKNOWN"
    for name in ("r-00000000", "r-11111111"):
        waiting(engine, name)
    assert refused(engine, order(OneRequest("r"))) == "KVD-FORCE-UNKNOWN", "two have that name"
    assert engine.half.step_orders().faults == []
    assert engine.script.told(ReportForced) == []


def test_a_load_that_is_over_and_a_request_that_has_finished_are_refused_with_the_reason() -> None:
    engine = Engine("d")
    request = waiting(engine)
    allocate(engine, request)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}, {"r": 0.0}))
    answer = engine.script.push(order(OneRequest("r")))
    assert isinstance(answer, Refused)
    assert answer.message == "the load of request r is over"
    engine.half.finished(request, ([1, 2, 3],), completed=True)
    answer = engine.script.push(order(OneRequest("r")))
    assert isinstance(answer, Refused)
    assert answer.message == "request 'r' has finished"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({}, Fault(FORCED, "before")),
        ({"when": "flight"}, Fault(FORCED, "flight")),
        ({"when": "layers"}, Fault(FORCED, "layers")),
        ({"part": LoadPart(layer="l1")}, Fault(FORCED, "layers", layer="l1")),
        ({"part": LoadPart(group=0)}, Fault(FORCED, "layers", group=0)),
        ({"part": LoadPart(rank=Rank(1))}, Fault(FORCED, "before", rank=Rank(1))),
    ],
    ids=str,
)
def test_the_load_of_a_waiting_request_is_ordered_to_miss(more: dict[str, Any], fault: Fault) -> None:
    engine = Engine("d")
    request, other = waiting(engine, "a"), waiting(engine, "b")
    given(engine, order(OneRequest("a"), **more))
    assert allocate(engine, other).fault is None
    assert allocate(engine, request).fault == fault
    assert engine.half.step_orders().faults == []


def test_a_load_under_way_is_given_up_in_the_next_step() -> None:
    engine = Engine("d")
    allocate(engine, waiting(engine))
    assert given(engine, order(OneRequest("r"))).requests[0].loading
    assert step(engine).faults == [("r", Fault(FORCED, "flight"))]
    assert step(engine).faults == []


@pytest.mark.parametrize("more", [{"when": "before"}, {"part": LoadPart(layer="l1")}], ids=str)
def test_what_is_under_way_cannot_fail_before_it_began(more: dict[str, Any]) -> None:
    engine = Engine("d")
    allocate(engine, waiting(engine))
    assert refused(engine, order(OneRequest("r"), **more)) == "KVD-FORCE-LATE"
    assert given(engine, order(AllWaiting(), **more)).requests == ()
    assert step(engine).faults == []


def test_all_that_wait_are_taken_and_none_that_comes_later() -> None:
    engine = Engine("d")
    requests = [waiting(engine, name) for name in "abc"]
    allocate(engine, requests[0])
    assert [p.request_id for p in given(engine, order(AllWaiting())).requests] == ["a", "b", "c"]
    assert state(engine).open is False
    assert [fault[0] for fault in step(engine).faults] == ["a"]
    assert [allocate(engine, request).fault for request in requests[1:]] == [Fault(FORCED, "before")] * 2
    assert allocate(engine, waiting(engine, "d")).fault is None


def test_the_next_loads_are_counted_down_and_no_more_are_taken() -> None:
    engine = Engine("d")
    given(engine, order(NextLoads(count=2)))
    assert state(engine).open
    taken = [allocate(engine, waiting(engine, name)).fault is not None for name in "abc"]
    assert taken == [True, True, False]
    assert (state(engine).open, state(engine).looked, state(engine).taken) == (False, 2, 2)


def test_a_ratio_takes_the_same_loads_for_the_same_seed() -> None:
    drawn = random.Random(7)
    expected = [drawn.random() < 0.3 for _ in range(40)]
    assert 0 < sum(expected) < 40
    engine = Engine("d")
    given(engine, order(NextLoads(count=40, ratio=0.3, seed=7)))
    taken = [allocate(engine, waiting(engine, str(n))).fault is not None for n in range(41)]
    assert taken == [*expected, False]
    assert (state(engine).looked, state(engine).taken) == (40, sum(expected))


def test_an_order_ends_when_it_is_cleared_or_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("d")
    given(engine, order(NextLoads(seconds=60.0)))
    assert allocate(engine, waiting(engine, "a")).fault is not None
    assert engine.script.push(ClearForced(engine_id="d", order_id="o1")) == ForcedCleared(("o1",))
    assert engine.script.push(ClearForced(engine_id="d")) == ForcedCleared(())
    assert allocate(engine, waiting(engine, "b")).fault is None
    given(engine, order(NextLoads(seconds=60.0)))
    import time

    later = time.monotonic() + 61.0
    monkeypatch.setattr("kvd.vllm.scheduler.misses.time.monotonic", lambda: later)
    assert allocate(engine, waiting(engine, "c")).fault is None
    assert state(engine).open is False


def test_a_smaller_claim_after_a_miss_is_no_further_load() -> None:
    engine = Engine("d", HYBRID)
    request = engine.arrive(from_prefiller(9, ((5,), (6, 7))))
    engine.answer()
    engine.half.matched_tokens(request, 0)
    given(engine, order(NextLoads(count=2)))
    assert allocate(engine, request, 9).fault is not None
    outcomes = StepOutcomes({"r": why(CAUSE)}, {"r": 0.0}, {"r": 8})
    engine.half.loads_ended({"r"}, outcomes)
    assert engine.half.matched_tokens(request, 0) == (8, True)
    assert allocate(engine, request, 8).fault is None
    assert (state(engine).looked, state(engine).open) == (1, True)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}, {"r": 0.0}))
    assert misses(engine)[-1].state == "reported", "the second load is part of its recovery"
    request.num_computed_tokens = 8
    step(engine, r=2)
    assert (misses(engine)[-1].kept, misses(engine)[-1].recomputed) == (8, 2)


def test_orders_without_an_end_are_bounded() -> None:
    engine = Engine("d")
    for _ in range(16):
        given(engine, order(NextLoads()))
    assert refused(engine, order(NextLoads())) == "KVD-FORCE-BUSY"


def test_a_miss_is_followed_to_the_first_token() -> None:
    engine = Engine("d")
    request = waiting(engine)
    given(engine, order(OneRequest("r"), when="flight"))
    allocate(engine, request)
    missed(engine, request)
    step(engine)
    request.num_computed_tokens = 4
    step(engine, r=6)
    request.num_computed_tokens = 10
    step(engine, r=1)
    request._all_token_ids.append(99)
    step(engine, r=1)
    told = misses(engine)
    assert [m.state for m in told] == ["ordered", "forced", "reported", "rescheduled", "recovered"]
    last = told[-1]
    assert list(last.steps) == ["forced", "quiesced", "reported", "rescheduled", "first_token"]
    assert list(last.steps.values()) == sorted(last.steps.values())
    assert (last.kept, last.recomputed, last.cause) == (4, 6, CAUSE)
    engine.half.finished(request, ([1, 2, 3],), completed=True)
    assert len(misses(engine)) == len(told)


def test_the_end_of_a_request_ends_its_timeline() -> None:
    for token, end in (([99], "recovered"), ([], "over")):
        engine = Engine("d")
        request = waiting(engine)
        given(engine, order(OneRequest("r")))
        allocate(engine, request)
        missed(engine, request)
        step(engine, r=10)
        request._all_token_ids += token
        engine.half.finished(request, ([1, 2, 3],), completed=True)
        assert misses(engine)[-1].state == end


def test_an_abort_before_the_load_ends_it_too() -> None:
    engine = Engine("d")
    request = waiting(engine)
    given(engine, order(OneRequest("r")))
    engine.half.finished(request, ([],), completed=False)
    assert misses(engine)[-1].state == "over"
    assert step(engine).faults == []


def test_a_load_that_was_complete_first_is_late_and_no_miss() -> None:
    engine = Engine("d")
    request = waiting(engine)
    allocate(engine, request)
    given(engine, order(OneRequest("r")))
    assert len(step(engine).faults) == 1
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}, {"r": 0.0}))
    assert misses(engine)[-1].state == "late"


def test_one_that_needs_no_load_is_late() -> None:
    engine = Engine("d")
    request = waiting(engine)
    given(engine, order(OneRequest("r")))
    assert engine.half.matched_tokens(request, 10) == (0, False)
    assert (misses(engine)[-1].state, misses(engine)[-1].cause) == (
        "late",
        "nothing was to be loaded: its prompt is cached here",
    )


def test_a_request_misses_once_for_all_orders_that_name_it() -> None:
    engine = Engine("d")
    request = waiting(engine)
    given(engine, order(OneRequest("r"), when="flight"))
    given(engine, order(AllWaiting(), when="before"))
    assert allocate(engine, request).fault == Fault(FORCED, "flight")
    assert state(engine).taken == 1
