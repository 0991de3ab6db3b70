"""A decoder compares its prompt with the one that was prefilled before it claims anything, in pull."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.vllm.params import finished_prefill
from kvd.wire.handshake import GetPeer, PeerGone
from kvd.wire.identity import Endpoint
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.wire.reply import Refused
from kvd.wire.transfer import ReportTransfers, TransferRecord
from kvd.worker.cause import Cause, code_of, text_of
from tests.support.rigs.bench import GENERATION, KEY, prefill, prompt
from tests.support.rigs.desk import KEYLESS, PEER, SETTINGS, Desk, claimed, unsaid
from tests.support.rigs.half import HYBRID, Engine, Request, from_prefiller

OTHER = prompt([9, 9, 9, 9, 9, 9, 9, 9])


def said(desk: Desk) -> tuple[str, str]:
    return code_of(desk.claim.cause), text_of(desk.claim.cause)


def test_nothing_is_claimed_for_another_prompt_and_nobody_is_asked() -> None:
    desk = Desk(prompt=OTHER)
    code, cause = said(desk)
    assert code == "PROMPT_MISMATCH"
    assert "request p-1 of prefiller p had another prompt: the 8 tokens" in cause
    assert desk.script.calls == []


def test_of_a_pair_that_meets_for_the_first_time_the_peer_is_asked_for_before_its_lease() -> None:
    desk = Desk(known=False)
    assert desk.script.asked(LeaseClaim) == []
    desk.peer(PEER)
    assert desk.advance().pending
    desk.lease(claimed(20.0))
    assert not desk.advance().pending
    assert not desk.claim.cause


def test_another_prompt_is_found_as_soon_as_the_key_has_come() -> None:
    desk = Desk(known=False, prompt=OTHER)
    desk.peer(PEER)
    desk.advance()
    assert said(desk)[0] == "PROMPT_MISMATCH"
    assert desk.script.asked(LeaseClaim) == []


def test_the_lease_is_left_to_the_request_that_it_is_for() -> None:
    for desk in (Desk(prompt=OTHER), Desk(known=False, prompt=OTHER)):
        if desk.script.asked(GetPeer):
            desk.peer(PEER)
            desk.advance()
        desk.claims.end(desk.claim, "miss")
        assert desk.script.told(LeaseRelease) == []


def test_a_request_that_ends_before_the_prompts_were_compared_leaves_the_lease_too() -> None:
    desk = Desk(known=False)
    desk.claims.request_over(desk.claim)
    assert desk.script.told(LeaseRelease) == []


def test_a_digest_that_cannot_be_compared_is_not_taken_as_equal() -> None:
    desk = Desk(known=False)
    desk.peer(KEYLESS)
    desk.advance()
    code, cause = said(desk)
    assert code == "PROMPT_UNCHECKED"
    assert "its key for digests of prompts is not known here" in cause
    desk.claims.end(desk.claim, "miss")
    assert (desk.script.asked(LeaseClaim), desk.script.told(LeaseRelease)) == ([], [])


def test_the_key_is_asked_for() -> None:
    assert all(asked.message.keyed for asked in Desk().script.asked(GetPeer))


def test_a_key_that_is_known_is_not_forgotten_for_a_card_without_one() -> None:
    desk = Desk()
    desk.known.on_message(KEYLESS)
    assert desk.known.digest_key(prefill(())) == KEY
    other = msgspec.structs.replace(KEYLESS.peer, generation="gen-2")
    desk.known.learn(other, KEYLESS.endpoint)
    assert desk.known.digest_key(prefill((), generation="gen-2")) == b"", "another generation, another key"


@pytest.mark.parametrize("known", [True, False])
def test_a_prompt_that_is_shorter_than_what_was_prefilled_is_another_one(known: bool) -> None:
    desk = Desk(known=known, prompt=prompt(range(7)))
    code, cause = said(desk)
    assert code == "PROMPT_MISMATCH"
    assert "the prompt that was prefilled has 8 tokens and this one 7" in cause
    assert desk.script.calls == []


def test_a_prompt_that_only_begins_like_that_takes_what_was_prefilled() -> None:
    desk = Desk(prompt=prompt(range(12)))
    assert not desk.claim.cause
    assert desk.claim.tokens == 8


def test_an_adapter_is_no_base_model() -> None:
    desk = Desk(prompt=prompt(range(8), lora_request=SimpleNamespace(lora_int_id=1, lora_path="org/poet")))
    assert said(desk)[0] == "PROMPT_MISMATCH"


def test_a_refused_peer_is_the_cause_though_the_prompts_were_never_compared() -> None:
    desk = Desk(known=False)
    desk.peer(RefusedByDaemon(Refused(code="KVD-INCOMPATIBLE", message="dtype")))
    desk.advance()
    assert said(desk)[0] == "PEER_REFUSED"


def test_who_never_claimed_a_lease_releases_none_and_reads_none() -> None:
    refused, late = Desk(known=False, prompt=OTHER), Desk(known=False, prompt=OTHER)
    refused.peer(RefusedByDaemon(Refused(code="KVD-INCOMPATIBLE", message="dtype")))
    refused.advance()
    late.advance(SETTINGS.handshake_timeout + 1)
    for desk, code in ((refused, "PEER_REFUSED"), (late, "PEER_AWAY")):
        assert said(desk)[0] == code
        assert desk.claims.readers(time.monotonic()) == ()
        desk.claims.end(desk.claim, "miss")
        assert desk.script.told(LeaseRelease) == []


def test_who_claimed_a_lease_releases_it_whatever_came_then() -> None:
    desk = unsaid()
    desk.peer(RefusedByDaemon(Refused(code="KVD-INCOMPATIBLE", message="dtype")))
    desk.advance()
    desk.claims.end(desk.claim, "miss")
    assert len(desk.script.told(LeaseRelease)) == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_key_of_another_length_is_none(known: bool) -> None:
    short = msgspec.structs.replace(
        PEER, peer=msgspec.structs.replace(PEER.peer, digest_key=b"sixteen bytes...")
    )
    desk = Desk(known=False)
    if known:
        desk.known.on_message(short)
    desk.peer(short)
    assert code_of(desk.advance().cause) == "PROMPT_UNCHECKED"
    assert desk.known.digest_key(prefill(())) == b""


def test_who_answers_elsewhere_under_an_engines_name_does_not_replace_its_key() -> None:
    """Params name the kvd that is asked."""
    desk = unsaid()
    desk.peer(msgspec.structs.replace(PEER, peer=msgspec.structs.replace(PEER.peer, digest_key=b"x" * 32)))
    desk.advance()
    assert desk.known.digest_key(prefill(())) == KEY


def test_a_key_is_used_for_prefills_of_the_kvd_that_gave_it_and_no_others() -> None:
    """Else whoever answers first under an engine's name, with its generation, chooses the key for all its prompts."""
    planted, elsewhere = b"x" * 32, Endpoint("liar", 9)
    desk = Desk(known=False)
    for asked in desk.script.asked(GetPeer):
        assert asked.message.endpoint.host == "h"
    desk.known.learn(msgspec.structs.replace(PEER.peer, digest_key=planted), elsewhere)
    assert not desk.known.fits(prefill(()))
    desk.peer(PEER)
    desk.advance()
    assert desk.known.digest_key(prefill(())) == KEY
    assert desk.known.digest_key(msgspec.structs.replace(prefill(()), host="liar", port=9)) == planted
    desk.known.on_message(PeerGone(engine_id="p", generation=GENERATION, reason="it ended"))
    assert not desk.known.fits(prefill(()))
    assert not desk.known.fits(msgspec.structs.replace(prefill(()), host="liar", port=9))


# --- the scheduler's half ---


def other_prompt(params: dict[str, Any], request_id: str = "r") -> Request:
    return Request(request_id, params, [5] * 10, 10, _all_token_ids=[5] * 10)


def test_a_request_with_another_prompt_is_computed_here_at_once() -> None:
    engine = Engine("d")
    request = other_prompt(from_prefiller())
    engine.half.new_request(request)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    assert engine.script.calls == []


def records(engine: Engine) -> list[TransferRecord]:
    return [record for report in engine.script.told(ReportTransfers) for record in report.records]


def test_the_scheduler_writes_down_the_miss_that_no_worker_hears_of() -> None:
    engine = Engine("d")
    request = other_prompt(from_prefiller())
    engine.half.new_request(request)
    for _ in range(3):
        engine.half.matched_tokens(request, 0)
    (found,) = records(engine)
    assert (found.transfer_id, found.local_engine, found.local_rank) == ("r@scheduler", "d", "scheduler")
    assert (found.state, found.code, found.mode) == ("miss", "PROMPT_MISMATCH", "pull")
    assert (found.remote_engine, found.remote_generation, found.remote_request_id) == ("p", GENERATION, "p-1")
    assert "had another prompt" in found.cause
    (report,) = engine.script.told(ReportTransfers)
    assert report.incarnation == engine.half.incarnation


def test_every_end_before_a_load_is_written_down_with_its_code() -> None:
    for params, code in (({"do_remote_prefill": True}, "BAD_PARAMS"), (from_prefiller(), "PEER_REFUSED")):
        engine = Engine("d", known=False)
        request = engine.arrive(params)
        for asked in engine.script.asked(GetPeer):
            asked.fail(RefusedByDaemon(Refused(code="KVD-INCOMPATIBLE", message="dtype")))
        assert engine.half.matched_tokens(request, 0) == (0, False)
        assert [record.code for record in records(engine)] == [code]


def test_what_workers_report_the_scheduler_does_not() -> None:
    for policy, count in (("fail", 10), ("recompute", 10)):
        engine = Engine("d", policy=policy)
        request = engine.arrive(from_prefiller()) if policy == "recompute" else other_prompt(from_prefiller())
        if policy == "fail":
            engine.half.new_request(request)
        engine.answer()
        assert engine.half.matched_tokens(request, 0) == (count, True)
        engine.half.allocated(request, ([1, 2, 3],), count)
        engine.half.loads_ended({"r"}, outcomes(Cause("too slow", "TOO_LATE")))
        assert records(engine) == []


def test_what_is_cached_here_or_aborted_is_no_miss() -> None:
    engine = Engine("d")
    request = engine.arrive(from_prefiller())
    engine.answer()
    assert engine.half.matched_tokens(request, 10) == (0, False)
    aborted = engine.arrive(from_prefiller(), "s")
    engine.half.finished(aborted, ([],), completed=False)
    assert records(engine) == []


def test_the_second_prompt_of_one_set_of_params_misses_and_the_first_still_loads() -> None:
    engine, params = Engine("d"), from_prefiller()
    other = other_prompt(params, "second")
    engine.half.new_request(other)
    assert engine.half.matched_tokens(other, 0) == (0, False)
    first = engine.arrive(params, "first")
    engine.answer()
    assert engine.half.matched_tokens(first, 0) == (10, True)
    assert engine.script.told(LeaseRelease) == []


def test_under_policy_fail_it_fails_and_leaves_the_lease() -> None:
    engine = Engine("d", policy="fail")
    request = other_prompt(from_prefiller())
    engine.half.new_request(request)
    count, later = engine.half.matched_tokens(request, 0)
    assert (count, later) == (10, True)
    engine.half.allocated(request, ([1, 2, 3],), 10)
    (order,) = engine.half.step_orders().loads
    assert code_of(order.refused) == "PROMPT_MISMATCH"
    engine.half.loads_ended({"r"}, outcomes(order.refused))
    assert engine.script.told(LeaseRelease) == []


def outcomes(cause: Any) -> Any:
    from kvd.worker.orders import StepOutcomes

    return StepOutcomes({"r": cause})


def test_params_carry_the_digest_of_exactly_the_tokens_that_they_state() -> None:
    for groups, tokens in (((Engine("p").half.groups), 10), (HYBRID, 9)):
        engine = Engine("p", groups)
        request = engine.arrive({"do_remote_decode": True})
        request.num_computed_tokens = tokens
        request._all_token_ids.append(77)
        kept, params = engine.half.finished(request, tuple([4, 5, 6] for _ in groups), completed=True)
        assert kept
        assert params is not None
        assert params["remote_num_tokens"] == tokens
        key = engine.script.card().digest_key
        assert params["kvd_digest"] == prompt(range(10)).digest(key, tokens)


def test_what_one_scheduler_prefilled_another_decodes() -> None:
    """With a state the prefiller stops one token short, and the decoder's prompt has all of them."""
    for groups in (Engine("p").half.groups, HYBRID):
        prefiller, decoder = Engine("p", groups), Engine("d", groups, known=False)
        request = prefiller.arrive({"do_remote_decode": True})
        request.num_computed_tokens = request.num_prompt_tokens
        blocks = tuple([4, 5, 6] for _ in groups)
        _, params = prefiller.half.finished(request, blocks, completed=True)
        assert params is not None
        arrived = decoder.arrive(params)
        card = msgspec.structs.replace(PEER.peer, digest_key=prefiller.script.card().digest_key)
        (asked,) = decoder.script.asked(GetPeer)
        asked.answer(msgspec.structs.replace(PEER, peer=card))
        decoder.half.matched_tokens(arrived, 0)
        decoder.answer()
        assert decoder.half.matched_tokens(arrived, 0) == (request.num_prompt_tokens, True)


@pytest.mark.parametrize(
    "params",
    [
        [],
        "do_remote_prefill",
        {"do_remote_prefill": True},
        {"do_remote_prefill": "true"},
        {"do_remote_prefill": True, "kvd_contract": 2},
        {"do_remote_prefill": True, "transfer_mode": "push", "kvd_transfer_id": []},
        {"do_remote_decode": True, "transfer_mode": "push", "kvd_transfer_id": {}},
        {"do_remote_decode": "true"},
        {"do_remote_prefill": None, "do_remote_decode": None},
        {**finished_prefill(prefill(((1,),)), tp=1, pp=1, dcp=1), "remote_engine_id": "\ud800"},
        {**finished_prefill(prefill(((1,),)), tp=1, pp=1, dcp=1), "remote_block_ids": None},
    ],
)
def test_whatever_a_client_sends_its_prompt_is_computed_here(params: Any) -> None:
    engine = Engine("d", known=True)
    request = engine.arrive(params)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    engine.half.step_orders()
    request.num_computed_tokens = 10
    kept, _ = engine.half.finished(request, ([1, 2, 3],), completed=True)
    assert not kept
    assert engine.script.told(LeaseRelease) == []
