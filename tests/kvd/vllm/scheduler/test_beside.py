"""Loads that begin before their claim is answered: which may, and what the workers are told then."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvd.client.errors import ClientError, RefusedByDaemon, Unreachable
from kvd.vllm.params import finished_prefill
from kvd.vllm.scheduler.asking import KVD_BACK_SECONDS, UNKNOWN_LEASE_RETRIES
from kvd.wire.handshake import GetPeer
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.outcomes import ReportOutcomes
from kvd.wire.reply import Refused
from kvd.worker.cause import code_of, text_of
from kvd.worker.orders import ClaimAnswer, LoadOrder, StepOutcomes
from tests.support.rigs.bench import prefill, why
from tests.support.rigs.half import PEER, Engine, Request, from_prefiller

GONE = LeaseClaimed(request_id="p-1", seconds=0.0, reason="released", ended=True)
KEPT = LeaseClaimed(request_id="p-1", seconds=20.0)
UNKNOWN = LeaseClaimed(request_id="p-1", seconds=0.0, reason="never opened")


def begun(engine: Engine) -> tuple[Request, LoadOrder]:
    """A request whose load was ordered in the step that saw it first."""
    request = engine.arrive(from_prefiller())
    assert engine.half.matched_tokens(request, 0) == (10, True)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    (order,) = engine.half.step_orders().loads
    return request, order


def lease(engine: Engine, answer: LeaseClaimed | ClientError, number: int = -1) -> None:
    asked = engine.script.asked(LeaseClaim)[number]
    asked.fail(answer) if isinstance(answer, ClientError) else asked.answer(answer)


def kept(asked: LeaseClaim) -> LeaseClaimed:
    """What kvd says of the prefiller that the claim names."""
    return msgspec.structs.replace(KEPT, generation=asked.generation)


def answers(engine: Engine) -> list[ClaimAnswer]:
    return engine.half.step_orders().answered


def claim_of(engine: Engine) -> Any:
    return engine.half._claims.get("r")


def later(engine: Engine, seconds: float) -> None:
    """Let the claim have begun so long ago, and its next question be due."""
    claim = claim_of(engine)
    claim.began -= seconds
    claim.lease.due = min(claim.lease.due, time.monotonic())


# --- which loads begin ---


def test_a_load_is_ordered_in_the_first_step_that_sees_its_request() -> None:
    engine = Engine("d", load_timeout=7.0)
    _, order = begun(engine)
    assert order.unanswered
    assert order.seconds == 7.0
    assert len(engine.script.asked(LeaseClaim)) == 1
    assert answers(engine) == []


def test_kvd_is_to_tell_the_workers_of_a_first_claim_and_they_know_it_by_its_reader() -> None:
    engine = Engine("d")
    _, order = begun(engine)
    (asked,) = engine.script.asked(LeaseClaim)
    assert (asked.message.generation, asked.message.reader) == (order.prefill.generation, order.reader)
    assert order.prefill.generation
    assert 0.0 < order.asked_before < 5.0


class AtHand:
    """An engine's only worker, whose loads can be used in their step if they are ``short``."""

    short = True

    def takes(self, *_: object) -> bool:
        return self.short


def at_hand(engine: Engine, *, busy: bool = False) -> AtHand:
    worker = AtHand()
    engine.half.in_step.at_hand(worker, busy=busy, under_way=0)  # type: ignore[arg-type]
    return worker


def test_nobody_else_is_told_of_the_answer_where_the_scheduler_has_its_worker_at_hand() -> None:
    engine = Engine("d")
    at_hand(engine)
    request = engine.arrive(from_prefiller())
    (asked,) = engine.script.asked(LeaseClaim)
    assert asked.message.alone
    assert engine.half.matched_tokens(request, 0) == (9, False)
    engine.half.allocated(request, ([1, 2, 3],), 9)
    lease(engine, kept(asked.message))
    (told,) = engine.half.in_step.answers()
    assert (told.request_id, told.refused) == ("r", None)
    assert 0 < told.ago < 5, "it came before somebody looked"
    assert engine.half.in_step.answers() == []


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_without_other_work_asks_aloud_where_the_load_comes_between_steps_after_all(
    *, busy: bool
) -> None:
    """It makes no step before which it would look."""
    engine = Engine("d")
    worker = at_hand(engine, busy=busy)
    request = engine.arrive(from_prefiller())
    worker.short = False
    assert engine.half.matched_tokens(request, 0) == (10, True)
    asked = [one.message for one in engine.script.asked(LeaseClaim)]
    assert [one.alone for one in asked] == [True, False][: 2 - busy]
    assert {one.reader for one in asked} == {asked[0].reader}
    engine.half.allocated(request, ([1, 2, 3],), 10)
    lease(engine, kept(asked[-1]))
    (told,) = answers(engine)
    assert told.refused is None


def test_one_whose_claim_is_answered_by_then_needs_no_answer() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    orders = engine.half.step_orders()
    assert [order.unanswered for order in orders.loads] == [False]
    assert orders.answered == engine.half.step_orders().answered == []


def expired() -> dict[str, Any]:
    sent = prefill(((5, 6, 7),), tokens=10, lease_opened=time.time() - 100.0)
    return finished_prefill(sent, tp=1, pp=1, dcp=1)


def test_no_load_begins_before_its_prefiller_is_known() -> None:
    engine = Engine("d", known=False)
    request = engine.arrive(from_prefiller())
    assert engine.half.matched_tokens(request, 0) == (None, False)
    engine.script.asked(GetPeer)[0].answer(PEER)
    assert engine.half.matched_tokens(request, 0) == (10, True), "its lease is claimed now"
    assert len(engine.script.asked(LeaseClaim)) == 1


def test_nor_after_the_end_that_the_params_give_their_lease() -> None:
    engine = Engine("d")
    assert engine.half.matched_tokens(engine.arrive(expired()), 0) == (None, False)


def test_nor_while_our_kvd_is_away() -> None:
    engine = Engine("d")
    engine.script.state = replace(engine.script.state, connected=False, since=time.monotonic())
    assert engine.half.matched_tokens(engine.arrive(from_prefiller()), 0) == (None, False)


@pytest.mark.parametrize("answer", [UNKNOWN, Unreachable("no kvd")])
def test_nor_once_it_was_said_that_the_lease_is_unknown_or_its_kvd_away(
    answer: LeaseClaimed | ClientError,
) -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    lease(engine, answer)
    assert engine.half.matched_tokens(request, 0) == (None, False)


def test_nor_of_a_prompt_that_is_not_the_one_that_was_prefilled() -> None:
    engine = Engine("d")
    request = Request("r", from_prefiller(), prompt_token_ids=[9] * 10, _all_token_ids=[9] * 10)
    engine.half.new_request(request)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert engine.script.asked(LeaseClaim) == []


def test_a_prompt_that_is_cached_here_waits_for_no_answer() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    assert engine.half.matched_tokens(request, 10) == (0, False)
    assert [release.result for release in engine.script.told(LeaseRelease)] == ["done"]


# --- what the workers are told ---


def test_workers_hear_of_the_confirmation_once_with_the_leases_end() -> None:
    engine = Engine("d")
    begun(engine)
    engine.answer(lease_seconds=20.0)
    (answer,) = answers(engine)
    assert (answer.request_id, answer.refused) == ("r", None)
    assert answer.seconds == pytest.approx(20.0 - 0.5, abs=0.4), "from the order; it was claimed before"
    assert answers(engine) == []


def test_a_lease_is_not_enough_where_kvd_does_not_say_that_the_prefiller_is_who_it_was() -> None:
    engine = Engine("d")
    begun(engine)
    lease(engine, KEPT)
    assert answers(engine) == answers(engine) == []
    engine.script.asked(GetPeer)[0].answer(PEER)
    assert [answer.refused for answer in answers(engine)] == [None]


def test_a_prefiller_that_restarted_is_a_refusal_though_the_lease_is_confirmed() -> None:
    engine = Engine("d")
    begun(engine)
    lease(engine, KEPT)
    assert answers(engine) == answers(engine) == []
    engine.script.asked(GetPeer)[0].fail(
        RefusedByDaemon(Refused(code="KVD-PEER-GENERATION", message="it restarted"))
    )
    assert [code_of(answer.refused) for answer in answers(engine)] == ["PEER_GONE"]


def test_a_lease_that_ended_is_a_refusal_at_once_though_a_later_answer_might_differ() -> None:
    """The request's id may come again: what was read before is of the lease that ended."""
    engine = Engine("d")
    begun(engine)
    lease(engine, GONE)
    (answer,) = answers(engine)
    assert text_of(answer.refused).endswith("no longer keeps blocks of request p-1: released")
    assert len(engine.script.asked(LeaseClaim)) == 1


def test_an_unknown_lease_is_asked_for_again_beside_the_load() -> None:
    engine = Engine("d")
    begun(engine)
    for _ in range(UNKNOWN_LEASE_RETRIES):
        lease(engine, UNKNOWN)
        assert answers(engine) == []
        later(engine, 0.0)
        assert answers(engine) == []
    assert len(engine.script.asked(LeaseClaim)) == 1 + UNKNOWN_LEASE_RETRIES
    engine.answer()
    assert [answer.refused for answer in answers(engine)] == [None]


def test_a_kvd_that_is_away_is_waited_for_as_without_a_load() -> None:
    engine = Engine("d")
    begun(engine)
    lease(engine, Unreachable("no kvd"))
    assert answers(engine) == []
    later(engine, KVD_BACK_SECONDS + 1.0)
    engine.script.state = replace(engine.script.state, since=time.monotonic() - KVD_BACK_SECONDS - 1.0)
    engine.half.step_orders()
    lease(engine, Unreachable("no kvd"))
    assert [code_of(answer.refused) for answer in answers(engine)] == ["PEER_AWAY"]


def test_what_is_never_answered_is_a_refusal_when_its_time_is_up() -> None:
    engine = Engine("d", handshake_timeout=10.0)
    begun(engine)
    assert answers(engine) == []
    later(engine, 11.0)
    assert [code_of(answer.refused) for answer in answers(engine)] == ["PEER_AWAY"]


def test_a_refused_load_is_released_when_it_has_ended_and_counts_as_refused() -> None:
    engine = Engine("d")
    request, _ = begun(engine)
    lease(engine, GONE)
    engine.answer()
    (answer,) = answers(engine)
    assert engine.script.told(LeaseRelease) == []
    assert engine.half.matched_tokens(request, 0) == (0, False)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": answer.refused}, prefixes={"r": 0}))
    assert [release.result for release in engine.script.told(LeaseRelease)] == ["miss"]
    assert engine.half.matched_tokens(request, 0) == (0, False)
    (told,) = engine.script.told(ReportOutcomes)
    assert [(count.outcome, count.code, count.requests) for count in told.totals] == [
        ("refused", "LEASE_ENDED", 1)
    ]


def test_workers_that_have_it_whole_hear_that_another_missed() -> None:
    engine = Engine("d")
    begun(engine)
    engine.half.loads_ended(set(), StepOutcomes({"r": why("peer p is gone")}, prefixes={"r": 0}))
    assert [text_of(answer.refused) for answer in answers(engine)] == ["peer p is gone"]
    engine.answer()
    assert answers(engine) == [], "it is of no use any more"


def test_of_a_miss_on_all_workers_nobody_is_told_anything() -> None:
    engine = Engine("d")
    begun(engine)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": why("peer p is gone")}, prefixes={"r": 0}))
    engine.answer()
    assert answers(engine) == []
    assert [release.result for release in engine.script.told(LeaseRelease)] == ["miss"]


def test_a_request_that_is_aborted_meanwhile_waits_for_no_answer() -> None:
    engine = Engine("d")
    request, _ = begun(engine)
    engine.half.finished(request, ([1, 2, 3],), completed=False)
    engine.answer()
    orders = engine.half.step_orders()
    assert (orders.dropped, orders.answered) == (["r"], [])
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    assert [release.result for release in engine.script.told(LeaseRelease)] == ["done"]
