"""A scheduler that drains: what it still takes, what it turns away, and what it says it holds."""

from __future__ import annotations

from kvd.vllm.scheduler.draining import NOT_PUSHED, Draining
from kvd.wire.drain import EngineHolds, SetDraining
from kvd.wire.outcomes import ReportOutcomes
from tests.support.rigs.half import PREFILL_HERE, Engine, from_prefiller


def set_draining(engine: Engine, seconds: float | None) -> EngineHolds:
    answer = engine.script.push(SetDraining(seconds=seconds))
    assert isinstance(answer, EngineHolds)
    return answer


def outcomes(engine: Engine) -> set[tuple[str, str]]:
    [*_, told] = engine.script.told(ReportOutcomes)
    return {(count.outcome, count.code) for count in told.totals}


def test_a_prefiller_keeps_nothing_for_what_comes_then_and_finishes_what_it_has() -> None:
    engine = Engine("p")
    early = engine.arrive(dict(PREFILL_HERE), "early")
    assert set_draining(engine, 0.0).prefills == 1
    late = engine.arrive(dict(PREFILL_HERE), "late")
    kept, params = engine.half.finished(early, ([5],), completed=True)
    assert kept
    assert params is not None
    assert params["kvd_draining"] is True
    assert engine.half.finished(late, ([6],), completed=True) == (False, None)
    assert outcomes(engine) == {("offered", ""), ("not_offered", "DRAINING")}
    assert set_draining(engine, None).prefills == 0
    again = engine.arrive(dict(PREFILL_HERE), "again")
    kept, params = engine.half.finished(again, ([7],), completed=True)
    assert kept
    assert params is not None
    assert "kvd_draining" not in params


def test_within_the_grace_requests_are_served_as_ever() -> None:
    engine = Engine("p")
    set_draining(engine, 60.0)
    kept, _ = engine.half.finished(engine.arrive(dict(PREFILL_HERE)), ([5],), completed=True)
    assert kept


def test_a_decoder_computes_what_comes_then_and_loads_what_it_has() -> None:
    engine = Engine("d")
    early = engine.arrive(from_prefiller(), "early")
    engine.answer()
    assert engine.half.matched_tokens(early, 0) == (10, True)
    assert set_draining(engine, 0.0).loads == 1
    late = engine.arrive(from_prefiller(), "late")
    assert engine.half.matched_tokens(late, 0) == (0, False)
    assert engine.half.matched_tokens(early, 0) == (10, True)
    assert ("refused", "DRAINING") in outcomes(engine)


def test_a_decoder_whose_requests_would_fail_loads_all_the_same() -> None:
    engine = Engine("d", policy="fail")
    set_draining(engine, 0.0)
    late = engine.arrive(from_prefiller(), "late")
    engine.answer()
    assert engine.half.matched_tokens(late, 0) == (10, True)


def test_a_push_that_is_asked_for_then_is_declined_to_its_decoder() -> None:
    engine = Engine("p", mode="push")
    pushed = {**PREFILL_HERE, "transfer_mode": "push"}
    engine.arrive({**pushed, "kvd_transfer_id": "early"}, "early")
    assert set_draining(engine, 0.0).pushes == 1
    late = engine.arrive({**pushed, "kvd_transfer_id": "late"}, "late")
    [end] = engine.half.step_orders().push_ends
    assert (end.transfer_id, end.request_id, end.cause) == ("late", "late", NOT_PUSHED)
    assert engine.half.finished(late, ([6],), completed=True) == (False, None)


def test_the_card_says_it_to_a_kvd_that_is_started_again() -> None:
    engine = Engine("p")
    assert engine.script.card().draining is None
    set_draining(engine, 60.0)
    left = engine.script.card().draining
    assert left is not None
    assert 59 < left <= 60


def test_a_drain_that_is_told_again_does_not_begin_anew() -> None:
    draining = Draining(lambda: (0, 0))
    draining.asked(SetDraining(seconds=0.0))
    draining.asked(SetDraining(seconds=60.0))
    assert draining.closed
    assert draining.asked(EngineHolds(prefills=0, pushes=0, loads=0)) is None
