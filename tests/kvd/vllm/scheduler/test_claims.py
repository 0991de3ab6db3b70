"""The decoding side's claims, with a kvd that says what the test tells it to say."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvd.client.errors import RefusedByDaemon, TimedOut, Unreachable
from kvd.client.session import SessionState
from kvd.vllm.scheduler.asking import KVD_AWAY_PAUSE, KVD_BACK_SECONDS, UNKNOWN_LEASE_RETRIES
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.vllm.scheduler.unloaded import record_unloaded
from kvd.wire.frame import decode, encode
from kvd.wire.handshake import GetPeer, PeerGone
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.wire.reply import Ok, Refused
from kvd.wire.transfer import ReportTransfers
from kvd.worker.cause import code_of, text_of
from tests.support.rigs.bench import GENERATION, Script, prefill
from tests.support.rigs.desk import PEER, PROMPT, SETTINGS, Desk, claimed, unsaid


def test_of_a_prefiller_that_is_known_the_lease_alone_is_asked_for() -> None:
    desk = Desk()
    (lease,) = desk.script.asked(LeaseClaim)
    assert (lease.message.key.request_id, lease.message.extend_seconds) == ("p-1", 0.0)
    assert lease.message.generation == GENERATION
    assert desk.advance().pending
    assert desk.script.asked(GetPeer) == []


def test_its_answer_makes_the_claim_usable() -> None:
    desk = Desk()
    desk.lease(claimed(20.0))
    claim = desk.advance()
    assert not claim.pending
    assert not claim.cause
    assert claim.lease.valid_until == pytest.approx(claim.lease.asked + 20.0 - SETTINGS.lease_margin)
    assert claim.handshake_seconds == 0.0
    assert desk.script.asked(GetPeer) == []


def test_of_one_that_is_not_known_the_peer_is_asked_for_first() -> None:
    desk = Desk(known=False)
    (peer,) = desk.script.asked(GetPeer)
    assert (peer.message.engine_id, peer.message.generation) == ("p", GENERATION)
    assert peer.message.endpoint.host == "h"
    assert desk.script.asked(LeaseClaim) == [], "of which prompt it is cannot be told yet"
    desk.peer(PEER)
    assert desk.advance().pending
    desk.lease(claimed(20.0))
    claim = desk.advance()
    assert (claim.pending, claim.cause, claim.handshake_seconds) == (False, None, 0.25)


def test_an_answer_that_does_not_name_its_generation_leaves_the_prefiller_to_be_asked_for() -> None:
    desk = unsaid()
    desk.peer(PEER)
    assert not desk.advance().pending
    assert not desk.claim.cause


def test_a_refused_handshake_is_the_cause_in_kvds_words() -> None:
    desk = Desk(known=False)
    refusal = Refused(
        code="KVD-INCOMPATIBLE", message="d cannot read from p: dtype is bf16 here and fp16 there"
    )
    desk.peer(RefusedByDaemon(refusal))
    assert text_of(desk.advance().cause) == f"prefiller p: {refusal.message}"


def test_a_refusal_weighs_more_than_what_was_known_before() -> None:
    desk = unsaid()
    desk.peer(RefusedByDaemon(Refused(code="KVD-PEER-GENERATION", message="it restarted")))
    assert text_of(desk.advance().cause) == "prefiller p: it restarted"


@pytest.mark.parametrize(
    "away",
    [
        TimedOut("no answer"),
        Unreachable("no kvd"),
        RefusedByDaemon(Refused(code="KVD-PEER-UNREACHABLE", message="no")),
    ],
)
def test_a_known_peer_is_good_enough_while_a_kvd_is_away(away: Exception) -> None:
    desk = unsaid()
    desk.peer(away)
    assert not desk.advance().pending
    assert not desk.claim.cause


def test_an_unknown_peer_is_not() -> None:
    desk = Desk(known=False)
    desk.peer(Unreachable("no kvd"))
    assert text_of(desk.advance().cause) == "prefiller p: no kvd"


def test_a_peer_that_is_gone_is_known_no_longer() -> None:
    known = KnownPeers()
    known.on_message(PEER)
    known.on_message(PeerGone(engine_id="p", generation="another", reason=""))
    assert known.fits(prefill(()))
    assert not known.fits(prefill((), generation="another"))
    known.on_message(PeerGone(engine_id="p", generation=GENERATION, reason=""))
    assert not known.fits(prefill(()))


def test_an_answer_of_the_wrong_kind_is_a_cause() -> None:
    desk = Desk(known=False)
    desk.peer(Ok())
    assert text_of(desk.advance().cause) == "prefiller p: kvd answered Ok"
    desk = Desk()
    desk.lease(Ok())
    assert text_of(desk.advance().cause) == "lease of request p-1: kvd answered Ok"


def test_an_unknown_lease_is_asked_for_again_a_few_times() -> None:
    """Its announcement may still be on the way."""
    desk = Desk()
    for asked in range(1, UNKNOWN_LEASE_RETRIES + 1):
        desk.lease(claimed(0.0, "never opened"))
        assert desk.advance().pending
        assert len(desk.script.asked(LeaseClaim)) == asked, "not before its pause is over"
        assert desk.advance(1.0).pending
        assert len(desk.script.asked(LeaseClaim)) == asked + 1
    desk.lease(claimed(0.0, "never opened"))
    assert text_of(desk.advance().cause) == "prefiller p no longer keeps blocks of request p-1: never opened"


def test_a_lease_that_appears_meanwhile_is_taken() -> None:
    desk = Desk()
    desk.lease(claimed(0.0))
    desk.advance()
    desk.advance(1.0)
    desk.lease(claimed(20.0))
    assert not desk.advance().pending
    assert not desk.claim.cause


def test_while_kvd_is_away_a_claim_waits_for_it_and_nothing_is_read(away: SessionState) -> None:
    desk = Desk()
    desk.script.state = replace(away, since=time.monotonic())
    assert desk.advance(0.9 * KVD_BACK_SECONDS).pending
    desk.script.state = Script().state
    desk.lease(claimed(20.0))
    assert not desk.advance(KVD_BACK_SECONDS).pending
    assert not desk.claim.cause


def test_a_claim_that_no_kvd_confirmed_is_a_miss_however_long_the_lease(away: SessionState) -> None:
    """Another decoder may have the same params: only the prefiller's kvd knows whether it has ended the lease."""
    desk = Desk()
    desk.script.state = replace(away, since=time.monotonic())
    cause = desk.advance(1.1 * KVD_BACK_SECONDS).cause
    said = "whether the blocks of request p-1 are kept cannot be asked: kvd is away"
    assert (text_of(cause), code_of(cause)) == (said, "PEER_AWAY")
    assert not desk.claim.lease.valid_until


def test_where_kvd_has_been_away_for_long_nobody_waits(away: SessionState) -> None:
    desk = Desk()
    desk.script.state = away
    assert code_of(desk.advance().cause) == "PEER_AWAY"


AWAY_THERE = RefusedByDaemon(Refused(code="KVD-PEER-UNREACHABLE", message="no answer"))


def test_while_the_prefillers_kvd_is_away_it_is_asked_again() -> None:
    desk = Desk()
    desk.lease(AWAY_THERE)
    assert desk.advance().pending
    assert desk.advance(KVD_AWAY_PAUSE).pending
    assert len(desk.script.asked(LeaseClaim)) == 2
    desk.lease(claimed(20.0))
    assert not desk.advance().pending
    assert not desk.claim.cause


BUSY = RefusedByDaemon(Refused(code="KVD-BUSY", message="8704 requests wait already", hint="try again"))


@pytest.mark.parametrize("known", [True, False])
def test_a_kvd_that_is_busy_is_asked_again_for_the_peer_and_for_the_lease(*, known: bool) -> None:
    desk = Desk(known=known)
    if not known:
        desk.peer(BUSY)
        assert desk.advance().pending
        assert len(desk.script.asked(GetPeer)) == 1
        assert desk.advance(KVD_AWAY_PAUSE).pending
        desk.peer(PEER, -1)
        desk.advance()
    desk.lease(BUSY)
    assert desk.advance(KVD_AWAY_PAUSE).pending
    assert desk.advance(2 * KVD_AWAY_PAUSE).pending
    desk.lease(claimed(20.0))
    assert not desk.advance().pending
    assert not desk.claim.cause


def test_a_kvd_that_stays_busy_is_a_peer_that_is_away() -> None:
    desk = Desk(known=False)
    desk.peer(BUSY)
    assert code_of(desk.advance(1.1 * SETTINGS.handshake_timeout).cause) == "PEER_AWAY"


def test_a_prefillers_kvd_that_stays_away_is_a_miss() -> None:
    desk = Desk()
    desk.claim.began -= 1.1 * KVD_BACK_SECONDS
    desk.lease(AWAY_THERE)
    cause = desk.advance().cause
    said = "whether the blocks of request p-1 are kept cannot be asked: no answer"
    assert (text_of(cause), code_of(cause)) == (said, "PEER_AWAY")


def test_what_was_confirmed_before_kvd_went_away_still_is(away: SessionState) -> None:
    desk = Desk()
    desk.lease(claimed(20.0))
    desk.advance()
    desk.script.state = away
    assert not desk.advance(10.0).pending
    assert not desk.claim.cause


def test_any_other_refusal_of_the_lease_is_the_end() -> None:
    desk = Desk()
    desk.lease(RefusedByDaemon(Refused(code="KVD-NOT-YOUR-ENGINE", message="not yours")))
    assert text_of(desk.advance().cause) == "lease of request p-1: not yours"


def test_nothing_is_waited_for_without_an_end() -> None:
    desk = Desk()
    assert desk.advance(9.9).pending
    cause = desk.advance(10.1).cause
    assert "prefiller p at h:7 was not known within 10 s" in text_of(cause)


def test_bad_params_are_a_cause_and_nobody_is_asked() -> None:
    desk = Desk(kvd_contract=9)
    assert "kvd_contract 9" in text_of(desk.claim.cause)
    assert desk.script.calls == []
    desk.claims.end(desk.claim, "miss")
    assert desk.script.delivered == [], "whose lease this is cannot be known"


def test_a_state_that_covers_the_whole_prompt_cannot_be_used_and_its_lease_is_left_alone() -> None:
    """It may be the state of another prompt, one token longer, whose request still comes for it."""
    desk = Desk(state=True)
    assert "the one after 8 tokens and the prompt has 8" in text_of(desk.claim.cause)
    assert desk.claims.readers(time.monotonic()) == ()
    desk.claims.end(desk.claim, "miss")
    assert desk.script.told(LeaseRelease) == []


def test_attention_alone_may_cover_the_whole_prompt() -> None:
    assert Desk().claim.tokens == 8


def test_a_request_whose_id_kvd_does_not_take_is_computed_here() -> None:
    desk, long = Desk(), "r" * 513
    asked = len(desk.script.asked(GetPeer))
    desk.claims.begin(long, {"do_remote_prefill": True}, PROMPT, state=False)
    claim = desk.claims.get(long)
    assert claim is not None
    assert (code_of(claim.cause), text_of(claim.cause)) == (
        "BAD_PARAMS",
        "the request's id has 513 characters, kvd takes 512",
    )
    assert len(desk.script.asked(GetPeer)) == asked
    entry = record_unloaded(claim, engine_id="d", backend="nixl")
    assert len(entry.request_id) == len(entry.transfer_id) == 512
    assert entry.request_id != entry.transfer_id
    decode(encode(ReportTransfers(incarnation="i", records=(entry,)), 1))
