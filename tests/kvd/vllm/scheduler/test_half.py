"""The scheduler's half of a decoder as vLLM calls it, with one group and as a hybrid."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.wire.reply import Refused
from kvd.worker.cause import Cause
from kvd.worker.later import LATER_SECONDS, TOGETHER_SECONDS
from kvd.worker.orders import StepOutcomes
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import GENERATION, KEY, Script, facts, prefill, why
from tests.support.rigs.half import HYBRID, LLAMA, Engine, Request, Step, from_prefiller


def test_a_scheduler_names_the_home_of_an_engine_on_several_hosts() -> None:
    assert Engine("p").script.card().home is None
    assert Engine("p", home="head:7766").script.card().home == Endpoint("head", 7766)


def test_a_request_without_params_is_left_alone() -> None:
    engine = Engine("d")
    assert engine.half.matched_tokens(engine.arrive(None), 0) == (0, False)
    assert engine.script.calls == []


def test_not_yet_then_the_count_then_never_again() -> None:
    engine = Engine("d", known=False)
    request = engine.arrive(from_prefiller())
    assert engine.half.matched_tokens(request, 0) == (None, False)
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (10, True), "its prompt fits, and its lease is claimed"
    assert engine.half.matched_tokens(request, 0) == (10, True), "there were no free blocks: asked again"
    engine.half.allocated(request, ([1, 2, 3],), 10)
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_a_request_that_was_not_announced_is_taken_all_the_same() -> None:
    engine = Engine("d")
    request = Request("r", from_prefiller())
    assert engine.half.matched_tokens(request, 0) == (10, True)
    assert len(engine.script.asked(LeaseClaim)) == 1


def test_the_order_names_the_blocks_of_what_is_missing() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    assert engine.half.matched_tokens(request, 4) == (6, True)
    engine.half.allocated(request, ([1, 2, 3, 4],), 6)
    (order,) = engine.half.step_orders().loads
    assert (order.request_id, order.tokens, order.groups) == ("r", 10, {0: (1, (2, 3))})
    assert 0 < order.seconds <= 20.0 - 0.5
    assert engine.half.step_orders().loads == []


def test_the_load_has_no_more_time_than_the_lease() -> None:
    engine = Engine("d", load_timeout=5.0)
    request = engine.arrive(from_prefiller())
    engine.answer(lease_seconds=2.0)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    assert engine.half.step_orders().loads[0].seconds <= 1.5


def test_a_hybrid_loads_the_state_and_the_attention_together() -> None:
    engine = Engine("d", HYBRID)
    request = engine.arrive(from_prefiller(9, ((41,), (5, 6))))
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (9, True)
    engine.half.allocated(request, ([0, 30], [1, 2]), 9)
    (order,) = engine.half.step_orders().loads
    assert order.groups == {0: (0, (30,)), 1: (0, (1, 2))}


def test_a_hybrid_loads_the_state_also_where_all_attention_but_the_last_block_is_here() -> None:
    engine = Engine("d", HYBRID)
    request = engine.arrive(from_prefiller(9, ((41,), (5, 6))))
    engine.answer()
    assert engine.half.matched_tokens(request, 8) == (1, True)
    engine.half.allocated(request, ([0, 30], [1, 2]), 1)
    (order,) = engine.half.step_orders().loads
    assert (order.computed, order.groups, order.refused) == (8, {0: (0, (30,)), 1: (1, (2,))}, None)


@pytest.mark.parametrize("claimed", [0, 8])
def test_a_state_is_never_loaded_for_another_position_than_its_own(claimed: int) -> None:
    engine = Engine("d", HYBRID)
    request = engine.arrive(from_prefiller(9, ((41,), (5, 6))))
    engine.answer()
    engine.half.matched_tokens(request, claimed)
    engine.half.allocated(request, ([30], [1]), 8 - claimed or 4)
    (order,) = engine.half.step_orders().loads
    assert order.refused is not None
    assert order.refused.code == "DOES_NOT_FIT"
    assert f"asks for {order.tokens} tokens and the prefiller's state is the one after 9" in str(
        order.refused
    )


def test_a_prompt_that_is_cached_here_needs_nothing_and_lets_the_lease_go() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller(8))
    engine.answer()
    assert engine.half.matched_tokens(request, 8) == (0, False)
    assert [r.result for r in engine.script.told(LeaseRelease)] == ["done"]


@pytest.mark.parametrize(("cause", "later"), [(None, True), (why("lost"), False)], ids=["done", "miss"])
def test_a_lease_is_released_after_the_step_of_the_first_token_and_at_once_where_there_is_none(
    cause: Cause | None, later: bool
) -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.step_orders()
    engine.half.loads_ended({"r"}, StepOutcomes({"r": cause}, prefixes={"r": 0} if cause else {}))
    (release,) = (one for one in engine.script.delivered if isinstance(one.message, LeaseRelease))
    least, most = (LATER_SECONDS, LATER_SECONDS + TOGETHER_SECONDS) if later else (0.0, 0.0)
    assert least <= release.after <= most


def test_a_request_that_was_aborted_releases_its_lease_at_once() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.finished(request, ([1, 2, 3],), completed=False)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    (release,) = (one for one in engine.script.delivered if isinstance(one.message, LeaseRelease))
    assert release.after == 0.0


def test_a_finished_load_releases_the_lease() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    assert [r.result for r in engine.script.told(LeaseRelease)] == ["done"]
    assert engine.half.finished(request, ([1, 2, 3],), completed=True) == (False, None)


def test_a_miss_on_one_worker_counts_when_the_last_one_has_reported() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.loads_ended(set(), StepOutcomes({"r": why("peer p is gone")}))
    assert engine.script.told(LeaseRelease) == []
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    assert [r.result for r in engine.script.told(LeaseRelease)] == ["miss"]
    assert engine.half.matched_tokens(request, 0) == (0, False), "the same claim is not made twice"


def test_an_abort_during_the_load_releases_the_lease_when_the_load_is_over() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    assert engine.half.finished(request, ([1, 2, 3],), completed=False) == (False, None)
    assert engine.script.told(LeaseRelease) == []
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    assert [r.result for r in engine.script.told(LeaseRelease)] == ["done"]


def test_an_abort_before_the_load_releases_it_at_once() -> None:
    engine = Engine("d")
    engine.half.finished(engine.arrive(from_prefiller()), ([],), completed=False)
    assert [r.result for r in engine.script.told(LeaseRelease)] == ["aborted"]


# --- claims of which nothing is loaded ---


def released(engine: Engine) -> list[str]:
    return [release.result for release in engine.script.told(LeaseRelease)]


def test_what_vllm_does_not_load_after_all_is_let_go_with_the_blocks() -> None:
    """A local hit covers it, another connector has it, or the request wants every position computed."""
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (10, True)
    engine.half.allocated(request, ([1, 2, 3],), 0)
    assert released(engine) == ["done"]
    assert engine.half.step_orders().loads == []
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_so_is_a_claim_that_kvd_has_not_answered() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    assert engine.half.matched_tokens(request, 0) == (10, True)
    engine.half.allocated(request, ([1, 2, 3],), 0)
    assert released(engine) == ["done"]


def test_what_vllm_computes_without_asking_is_let_go_in_that_step() -> None:
    engine = Engine("d")
    engine.arrive(from_prefiller(), "mine")
    engine.arrive(from_prefiller(), "waiting")
    engine.answer()
    engine.half.step_orders(Step({"another": 4}))
    assert released(engine) == []
    engine.half.step_orders(Step({"mine": 10}))
    assert released(engine) == ["done"]
    engine.half.step_orders(Step({"mine": 1}))
    assert released(engine) == ["done"], "once"


def test_what_is_let_go_is_renewed_no_longer() -> None:
    engine = Engine("d", lease_seconds=1.0)
    request = engine.arrive(from_prefiller())
    engine.answer(lease_seconds=1.0)
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 0)
    engine.half._claims.renew(time.monotonic() + 100.0)
    assert len(engine.script.asked(LeaseClaim)) == 1


def test_a_load_that_is_ordered_or_done_is_not_let_go_by_a_step() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.step_orders(Step({}))
    engine.half.allocated(request, ([1, 2, 3],), 0)  # builds before 0.30 say so once it has come
    assert released(engine) == []
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    engine.half.step_orders(Step({"r": 1}))
    assert released(engine) == ["done"]


def test_policy_recompute_computes_what_kvd_refuses() -> None:
    engine = Engine("d", known=False)
    request = engine.arrive(from_prefiller())
    refusal = RefusedByDaemon(Refused(code="KVD-INCOMPATIBLE", message="dtype is bf16 here and fp16 there"))
    engine.script.asked(GetPeer)[0].fail(refusal)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert engine.script.asked(LeaseClaim) == []
    assert engine.script.told(LeaseRelease) == []


@pytest.mark.parametrize("params", [from_prefiller(), {**from_prefiller(), "kvd_contract": 9}])
def test_policy_fail_orders_a_load_that_fails_with_the_cause(params: dict[str, Any]) -> None:
    engine = Engine("d", policy="fail", known=False)
    request = engine.arrive(params)
    for asked in engine.script.asked(GetPeer):
        asked.fail(RefusedByDaemon(Refused(code="KVD-INCOMPATIBLE", message="no")))
    count, asynchronous = engine.half.matched_tokens(request, 0)
    assert count
    assert asynchronous
    engine.half.allocated(request, ([1, 2, 3],), count)
    (order,) = engine.half.step_orders().loads
    assert order.refused in ("prefiller p: no", order.refused)
    assert order.refused
    assert order.block_ids


def test_a_lease_that_ran_out_in_the_queue_is_not_tried() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer(lease_seconds=0.5)  # all of it is margin
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_what_kvd_pushes_before_the_half_is_complete_is_not_lost() -> None:
    card = EngineCard(engine=facts("p"), generation=GENERATION, workers=(), digest_key=KEY)

    class Eager(Script):
        def open(self, card_of: Any, push: Any) -> Script:
            push(PeerReady(local_engine="d", peer=card))
            return super().open(card_of, push)

    script = Eager()
    half = SchedulerHalf(ConnectorSettings(), facts("d"), LLAMA, "recompute", script.open)
    assert half._known.fits(prefill(()))


def test_closing_ends_the_session() -> None:
    engine = Engine("p")
    engine.half.close()
    assert engine.script.closed
