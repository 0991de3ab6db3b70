"""The trace of a request: the scheduler's half hands it on with whatever kvd is told of the request."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.wire.lease import LeaseOpened
from kvd.wire.transfer import ReportTransfers
from tests.support.rigs.half import PREFILL_HERE, Engine, Step, from_prefiller

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HEADERS = {"traceparent": PARENT, "tracestate": "a=b"}
NONE = [None, {}, {"tracestate": "a=b"}, {"traceparent": PARENT[:-1] + "0"}, {"traceparent": "x" * 55}]


def prefilled(headers: Any) -> tuple[Engine, LeaseOpened]:
    engine = Engine("p")
    request = engine.arrive(dict(PREFILL_HERE), headers=headers)
    request.num_computed_tokens = 10
    engine.half.finished(request, ([5, 6, 7],), completed=True)
    (opened,) = engine.script.told(LeaseOpened)
    return engine, opened


def test_a_lease_names_the_trace_also_to_the_next_kvd() -> None:
    engine, opened = prefilled(HEADERS)
    assert [lease.traceparent for lease in opened.leases] == [PARENT]
    assert [lease.traceparent for lease in engine.half._card().leases] == [PARENT]


@pytest.mark.parametrize("headers", NONE)
def test_a_request_of_no_sampled_trace_names_none(headers: Any) -> None:
    assert [lease.traceparent for lease in prefilled(headers)[1].leases] == [""]
    engine = Engine("d")
    engine.arrive(from_prefiller(), headers=headers)
    claim = engine.half._claims.get("r")
    assert claim is not None
    assert claim.traceparent == ""


def test_a_load_is_ordered_with_its_trace() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller(), headers=HEADERS)
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (10, True)
    engine.half.allocated(request, ([2, 3, 4],), 10)
    (order,) = engine.half.step_orders().loads
    assert order.traceparent == PARENT


@pytest.mark.parametrize("params", [from_prefiller(tokens=11), {**from_prefiller(), "kvd_contract": 1}])
def test_a_miss_that_no_worker_hears_of_names_it(params: dict[str, Any]) -> None:
    engine = Engine("d")
    request = engine.arrive(params, headers=HEADERS)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    (told,) = engine.script.told(ReportTransfers)
    assert [record.traceparent for record in told.records] == [PARENT]


def test_each_step_of_a_push_names_it() -> None:
    engine = Engine("p", mode="push")
    engine.arrive({**PREFILL_HERE, "transfer_mode": "push", "kvd_transfer_id": "x"}, headers=HEADERS)
    engine.half.holds("r", lambda: ([5, 6, 7],))
    (step,) = engine.half.step_orders(Step({"r": 4})).pushes
    assert step.traceparent == PARENT
