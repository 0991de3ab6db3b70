"""Pushes as the decoder's scheduler sees them: params, claims without a lease, orders, and what is not wanted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvd.client.errors import RefusedByDaemon, TimedOut
from kvd.vllm.errors import BadParams
from kvd.vllm.memory.groups import has_state
from kvd.vllm.params import finished_prefill, read_remote_push, wants_push
from kvd.vllm.vllm_types import LOOKAHEAD, lookahead_of
from kvd.wire.handshake import GetPeer
from kvd.wire.lease import LeaseClaim
from kvd.wire.reply import Refused
from kvd.worker.cause import text_of
from kvd.worker.orders import StepOutcomes
from kvd.worker.remote import RemotePush
from tests.support.rigs.bench import GENERATION, KEY, prefill, prompt, why
from tests.support.rigs.half import HYBRID, LLAMA, PEER, Engine, Request, Step, ahead, from_prefiller

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_mode": "push",
    "kvd_transfer_id": "x",
    "remote_engine_id": "p",
    "remote_host": "h",
    "remote_port": 7,
    "kvd_contract": 1,
}
"""What a router sends to the decoder when it asks both sides at once."""


def decoder(groups: Any = None, policy: str = "recompute", **settings: Any) -> Engine:
    more = {} if groups is None else {"groups": groups}
    return Engine("d", policy=policy, mode="push", **more, **settings)


# --- params ---


def test_the_params_of_a_push_name_the_transfer_and_the_prefiller() -> None:
    assert read_remote_push(PARAMS) == RemotePush(transfer_id="x", engine_id="p", host="h", port=7)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (PARAMS, True),
        ({"transfer_mode": "push"}, True),
        ({"kvd_transfer_id": "x"}, True),
        (finished_prefill(prefill(((1,),)), tp=1, pp=1, dcp=1), False),
        ({**PARAMS, "transfer_mode": "pull", "kvd_transfer_id": None}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_push_is_told_by_its_name_or_its_mode(params: dict[str, Any] | None, wanted: bool) -> None:
    assert wants_push(params) is wanted


@pytest.mark.parametrize("name", ["kvd_transfer_id", "remote_engine_id", "remote_host", "remote_port"])
def test_a_missing_entry_is_named(name: str) -> None:
    params = {entry: value for entry, value in PARAMS.items() if entry != name}
    with pytest.raises(BadParams, match=f"lack {name}: a pushed request needs what names the prefiller"):
        read_remote_push(params)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kvd_contract", None, "kvd_contract None, this side speaks 2"),
        ("kvd_contract", 3, "kvd_contract 3, this side speaks 2"),
        ("transfer_mode", "pull", "transfer_mode 'pull': a transfer id belongs to \"push\""),
        ("kvd_transfer_id", "", "at kvd_transfer_id"),
        ("kvd_transfer_id", "x" * 513, "at kvd_transfer_id"),
        ("kvd_transfer_id", 7, "got `int`, at kvd_transfer_id"),
        ("remote_engine_id", "", "at remote_engine_id"),
        ("remote_host", None, "got `null`, at remote_host"),
        ("remote_port", -1, "at remote_port"),
        ("remote_port", 70000, "at remote_port"),
    ],
)
def test_a_value_that_means_nothing_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(BadParams, match=said):
        read_remote_push({**PARAMS, name: value})


def test_an_engine_does_not_push_to_itself() -> None:
    with pytest.raises(BadParams, match=r"this very engine \(p\)"):
        read_remote_push(PARAMS, own_engine_id="p")


# --- claims and orders ---


def test_a_push_asks_for_the_peer_and_for_no_lease() -> None:
    engine = decoder()
    engine.arrive(PARAMS)
    (asked,) = engine.script.asked(GetPeer)
    assert (asked.message.engine_id, asked.message.generation, asked.message.endpoint.port) == ("p", "", 7)
    assert engine.script.asked(LeaseClaim) == []


def test_not_yet_then_the_count_then_never_again() -> None:
    engine = decoder()
    request = engine.arrive(PARAMS)
    assert engine.half.matched_tokens(request, 0) == (None, False)
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (10, True)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_the_order_of_a_push_names_the_generation_that_kvd_knows() -> None:
    engine = decoder(push_timeout=50.0, load_timeout=1.0)
    request = engine.arrive(PARAMS)
    engine.answer()
    assert engine.half.matched_tokens(request, 4) == (6, True)
    engine.half.allocated(request, ([1, 2, 3, 4],), 6)
    (order,) = engine.half.step_orders().loads
    assert (order.transfer_id, order.tokens, order.computed, order.groups) == ("x", 10, 4, {0: (1, (2, 3))})
    assert (order.prefill.engine_id, order.prefill.generation, order.prefill.blocks) == ("p", GENERATION, ())
    assert (order.prefill.host, order.prefill.port, order.seconds) == ("h", 7, 50.0)


def test_a_state_is_of_one_token_less_than_the_prompt() -> None:
    engine = decoder(HYBRID)
    request = engine.arrive(PARAMS)
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (9, True)
    engine.half.allocated(request, ([0, 30], [1, 2]), 9)
    (order,) = engine.half.step_orders().loads
    assert (order.tokens, order.groups) == (9, {0: (0, (30,)), 1: (0, (1, 2))})


@pytest.mark.parametrize("groups", [LLAMA, HYBRID])
@pytest.mark.parametrize(("left", "tokens"), [(0, None), (1, 9), (3, 7), (9, 1), (10, None), (11, None)])
def test_what_a_prefiller_leaves_to_its_decoder_is_not_claimed(
    groups: Any, left: int, tokens: int | None
) -> None:
    """As much as the prefiller takes off, whatever drafter is here; of a prompt that is no longer it takes nothing."""
    whole = 10 - has_state(groups)
    drafts = replace(PEER, peer=replace(PEER.peer, engine=ahead(PEER.peer.engine, left)))
    engine = decoder(groups)
    request = engine.arrive(PARAMS)
    assert engine.half.matched_tokens(request, 0) == (None, False)
    engine.answer(peer=drafts)
    count, _ = engine.half.matched_tokens(request, 0)
    assert count == (tokens or whole)
    engine.half.allocated(request, ([30, 31, 32], [1, 2, 3])[: len(groups)], count)
    (order,) = engine.half.step_orders().loads
    assert (order.tokens, order.prefill.tokens, order.refused) == (count, count, None)
    assert order.digest == prompt(range(10)).digest(KEY, count)
    prefiller = Engine("p", groups, mode="push", lookahead=left)
    asked = {"do_remote_decode": True, "transfer_mode": "push", "kvd_transfer_id": "x"}
    if left < 10:
        assert prefiller.arrive(asked).num_prompt_tokens == count


def test_nonsense_of_another_host_leaves_nothing_out() -> None:
    for value in (-3, "many", 2.5, None):
        assert lookahead_of({LOOKAHEAD: value}) == 0
    assert lookahead_of({}) == 0


def test_a_prompt_of_one_token_has_no_state_to_push() -> None:
    engine = decoder(HYBRID)
    request = Request("r", PARAMS, [1], 1)
    engine.half.new_request(request)
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_a_request_without_a_transfer_id_is_pulled_as_ever() -> None:
    engine = decoder()
    request = engine.arrive(from_prefiller())
    assert len(engine.script.asked(LeaseClaim)) == 1
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    assert engine.half.step_orders().loads[0].transfer_id == ""


def test_an_engine_that_pulls_computes_what_it_is_asked_to_have_pushed() -> None:
    engine = Engine("d")
    request = engine.arrive(PARAMS)
    assert engine.script.calls == []
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_under_policy_fail_it_fails_with_the_cause() -> None:
    engine = Engine("d", policy="fail")
    request = engine.arrive(PARAMS)
    assert engine.half.matched_tokens(request, 0) == (10, True)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    (order,) = engine.half.step_orders().loads
    assert 'the mode of this engine is "pull"' in text_of(order.refused)


@pytest.mark.parametrize(
    "answer",
    [
        TimedOut("no answer"),
        RefusedByDaemon(Refused(code="KVD-PEER-UNREACHABLE", message="no answer")),
    ],
)
def test_what_kvd_knew_before_is_not_enough_while_it_is_away(answer: Exception) -> None:
    """Nothing can be announced then: unlike blocks that are kept for us, nothing waits there."""
    engine = decoder()
    card = engine.arrive(PARAMS, "first")
    engine.answer()
    assert engine.half.matched_tokens(card, 0) == (10, True)
    request = engine.arrive({**PARAMS, "kvd_transfer_id": "y"}, "second")
    engine.script.asked(GetPeer)[-1].future.set_exception(answer)
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_another_answer_is_a_cause() -> None:
    engine = decoder(policy="fail")
    request = engine.arrive(PARAMS)
    engine.script.asked(GetPeer)[0].answer(Refused(code="KVD-X", message="?"))
    assert engine.half.matched_tokens(request, 0) == (10, True)


# --- what is not wanted ---


def declined(engine: Engine) -> list[str]:
    return [name for name, _ in engine.half.step_orders().declined]


def test_a_prompt_that_is_cached_here_is_declined() -> None:
    engine = decoder()
    request = engine.arrive(PARAMS)
    engine.answer()
    assert engine.half.matched_tokens(request, 10) == (0, False)
    orders = engine.half.step_orders()
    assert orders.loads == []
    ((name, told),) = orders.declined
    assert (name, told.engine_id, told.generation, told.port) == ("x", "p", GENERATION, 7)
    assert declined(engine) == [], "once"


def test_a_push_that_vllm_does_not_load_after_all_is_declined() -> None:
    engine = decoder()
    request = engine.arrive(PARAMS)
    engine.answer()
    assert engine.half.matched_tokens(request, 0) == (10, True)
    engine.half.allocated(request, ([1, 2, 3],), 0)
    assert declined(engine) == ["x"]
    assert declined(engine) == [], "once"


def test_a_push_that_vllm_computes_without_asking_is_declined_in_that_step() -> None:
    engine = decoder()
    engine.arrive(PARAMS)
    engine.answer()
    assert [name for name, _ in engine.half.step_orders(Step({"r": 10})).declined] == ["x"]


def test_a_request_that_ends_before_its_turn_is_declined() -> None:
    engine = decoder()
    request = engine.arrive(PARAMS)
    assert engine.half.finished(request, ([],), completed=False) == (False, None)
    assert declined(engine) == ["x"]


def test_what_is_computed_here_after_all_is_declined() -> None:
    engine = decoder()
    request = engine.arrive(PARAMS)
    engine.script.asked(GetPeer)[0].fail(RefusedByDaemon(Refused(code="KVD-INCOMPATIBLE", message="no")))
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert declined(engine) == ["x"]


def test_a_request_aborted_during_its_load_has_it_dropped() -> None:
    engine = decoder()
    request = engine.arrive(PARAMS)
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.step_orders()
    assert engine.half.finished(request, ([1, 2, 3],), completed=False) == (False, None)
    orders = engine.half.step_orders()
    assert (orders.dropped, orders.declined) == (["r"], [])
    assert engine.half.step_orders().dropped == []
    engine.half.loads_ended({"r"}, StepOutcomes({"r": why("the request is over")}))
    assert declined(engine) == []


def test_a_pulled_load_is_dropped_too() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.finished(request, ([1, 2, 3],), completed=False)
    assert engine.half.step_orders().dropped == ["r"]


def test_a_request_that_ends_after_its_load_has_nothing_to_drop() -> None:
    engine = decoder()
    request = engine.arrive(PARAMS)
    engine.answer()
    engine.half.matched_tokens(request, 0)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    engine.half.loads_ended({"r"}, StepOutcomes({"r": None}))
    engine.half.finished(request, ([1, 2, 3],), completed=True)
    orders = engine.half.step_orders()
    assert (orders.dropped, orders.declined) == ([], [])
