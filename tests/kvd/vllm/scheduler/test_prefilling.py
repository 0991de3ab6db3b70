"""The scheduler's half of a prefiller: what it offers, what it keeps under a lease, and when that ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.client.session import SessionState
from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.params import read_remote_prefill
from kvd.wire.lease import LeaseClosed, LeaseEnded, LeaseOpened
from kvd.wire.registration import OpenLease, RegisterScheduler
from tests.support.rigs.bench import GENERATION
from tests.support.rigs.half import HYBRID, LLAMA, PREFILL_HERE, Engine, Request, Step


def test_a_finished_prefill_keeps_its_blocks_under_a_lease() -> None:
    engine = Engine("p", lease_seconds=12.0)
    request = engine.arrive(dict(PREFILL_HERE))
    request.num_computed_tokens = 10
    kept, params = engine.half.finished(request, ([5, 6, 7],), completed=True)
    assert kept
    assert params is not None
    read = read_remote_prefill(params, own_engine_id="d")
    assert (read.engine_id, read.request_id, read.generation) == ("p", "r", GENERATION)
    assert (read.host, read.port, read.tokens, read.blocks) == ("me", 9, 10, ((5, 6, 7),))
    assert read.lease_seconds == 12.0
    (opened,) = engine.script.told(LeaseOpened)
    assert [(lease.request_id, lease.blocks) for lease in opened.leases] == [("r", 3)]


def test_an_aborted_prefill_and_an_ordinary_request_keep_nothing() -> None:
    engine = Engine("p")
    assert engine.half.finished(engine.arrive(dict(PREFILL_HERE)), ([5],), completed=False) == (False, None)
    assert engine.half.finished(engine.arrive(None), ([5],), completed=True) == (False, None)
    assert engine.script.delivered == []


def test_without_a_kvd_nothing_is_offered_and_nothing_kept() -> None:
    engine = Engine("p")
    engine.script.state = SessionState()
    assert engine.half.finished(engine.arrive(dict(PREFILL_HERE)), ([5],), completed=True) == (False, None)


def test_the_generation_is_remembered_while_a_new_kvd_still_misses_workers() -> None:
    engine = Engine("p")
    first = engine.arrive(dict(PREFILL_HERE), "first")
    engine.half.finished(first, ([5],), completed=True)
    engine.script.state = replace(engine.script.state, engine_generation="")
    kept, params = engine.half.finished(engine.arrive(dict(PREFILL_HERE), "r2"), ([6],), completed=True)
    assert kept
    assert params is not None
    assert params["kvd_generation"] == GENERATION
    fresh = Engine("p")
    fresh.script.state = replace(fresh.script.state, engine_generation="")
    assert fresh.half.finished(fresh.arrive(dict(PREFILL_HERE)), ([5],), completed=True) == (False, None)


def test_a_prefiller_with_state_stops_one_token_short_and_only_once() -> None:
    engine = Engine("p", HYBRID)
    request = engine.arrive(dict(PREFILL_HERE))
    engine.half.new_request(request)
    assert (request.num_prompt_tokens, request.prompt_token_ids) == (9, list(range(9)))
    assert (request._all_token_ids, request.max_tokens) == (list(range(9)), 1)
    request.num_computed_tokens = 9
    kept, params = engine.half.finished(request, ([0, 41], [5, 6]), completed=True)
    assert kept
    assert params is not None
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (9, [[41], [5, 6]])


@pytest.mark.parametrize("groups", [LLAMA, HYBRID])
def test_a_prefiller_leaves_to_the_decoder_what_its_drafter_has_to_see_itself(
    groups: tuple[GroupFacts, ...],
) -> None:
    engine = Engine("p", groups, lookahead=3)
    request = engine.arrive(dict(PREFILL_HERE))
    engine.half.new_request(request)
    assert (request.num_prompt_tokens, request.prompt_token_ids) == (7, list(range(7)))
    request.num_computed_tokens = 7
    kept, params = engine.half.finished(request, ([5], [6])[: len(groups)], completed=True)
    assert kept
    assert params is not None
    assert params["remote_num_tokens"] == 7
    short = Request("s", dict(PREFILL_HERE), [1, 2, 3], 3, _all_token_ids=[1, 2, 3])
    engine.half.new_request(short)
    assert short.num_prompt_tokens == 3


@pytest.mark.parametrize(("groups", "tokens"), [(LLAMA, 10), (HYBRID, 9)])
def test_of_a_pushed_prompt_as_much_is_left_out_as_of_one_that_is_pulled(
    groups: tuple[GroupFacts, ...], tokens: int
) -> None:
    pushed = {**PREFILL_HERE, "transfer_mode": "push", "kvd_transfer_id": "x"}
    assert Engine("p", groups, mode="push").arrive(dict(pushed)).num_prompt_tokens == tokens
    engine = Engine("p", groups, mode="push", lookahead=3)
    assert engine.arrive(dict(pushed)).num_prompt_tokens == 7
    engine.half.holds("r", lambda: ([5, 6], [7, 8])[: len(groups)])
    (told,) = engine.half.step_orders(Step({"r": 7})).pushes
    assert (told.reached, told.total) == (7, 7)


def test_a_prompt_of_one_token_is_not_shortened_away() -> None:
    engine = Engine("p", HYBRID)
    request = Request("r", dict(PREFILL_HERE), [1], 1, _all_token_ids=[1])
    engine.half.new_request(request)
    assert request.num_prompt_tokens == 1


def test_a_prefiller_without_state_computes_the_whole_prompt() -> None:
    assert Engine("p").arrive(dict(PREFILL_HERE)).num_prompt_tokens == 10


def test_a_lease_that_kvd_ends_is_freed_in_the_next_step() -> None:
    engine = Engine("p")
    engine.half.finished(engine.arrive(dict(PREFILL_HERE)), ([5],), completed=True)
    assert engine.half.step_orders().freed == []
    engine.script.push(LeaseEnded(request_id="r", end="released"))
    assert engine.half.step_orders().freed == ["r"]
    assert engine.script.told(LeaseClosed) == []


def test_a_lease_that_our_clock_ends_is_told_to_kvd() -> None:
    engine = Engine("p", lease_seconds=0.1, lease_margin=0.0, lease_grace=0.0)
    engine.half.finished(engine.arrive(dict(PREFILL_HERE)), ([5],), completed=True)
    engine.half._leases._open["r"].expires -= 1.0
    assert engine.half.step_orders().freed == ["r"]
    assert [closed.request_id for closed in engine.script.told(LeaseClosed)] == ["r"]


def test_the_card_lists_the_leases_for_a_kvd_that_starts_anew() -> None:
    engine = Engine("p", policy="fail")
    engine.half.finished(engine.arrive(dict(PREFILL_HERE)), ([5, 6],), completed=True)
    card = engine.script.card()
    assert isinstance(card, RegisterScheduler)
    assert card.policy == "fail"
    (lease,) = card.leases
    assert isinstance(lease, OpenLease)
    assert (lease.request_id, lease.blocks) == ("r", 2)
