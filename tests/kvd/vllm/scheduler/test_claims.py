"""The decoding side's claims, with a kvd that says what the test tells it to say."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon, TimedOut, Unreachable
from kvd.client.session import SessionState
from kvd.vllm.params import finished_prefill
from kvd.vllm.prompt.parts import Prompt
from kvd.vllm.scheduler.claim import Claim, ClaimState
from kvd.vllm.scheduler.claims import KVD_AWAY_PAUSE, KVD_BACK_SECONDS, UNKNOWN_LEASE_RETRIES, Claims
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.vllm.scheduler.unloaded import record_unloaded
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import GetPeer, PeerGone, PeerReady
from kvd.wire.identity import EngineCard
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.reply import Ok, Refused
from kvd.wire.transfer import ReportTransfers
from kvd.worker.cause import code_of, text_of
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import GENERATION, KEY, Script, facts, prefill
from tests.support.rigs.bench import prompt as prompt_of_tokens

SETTINGS = ConnectorSettings(lease_seconds=30.0, lease_margin=0.5, handshake_timeout=10.0)
PEER = PeerReady(
    local_engine="d",
    peer=EngineCard(engine=facts("p"), generation=GENERATION, workers=(), digest_key=KEY),
    seconds=0.25,
)
KEYLESS = msgspec.structs.replace(PEER, peer=msgspec.structs.replace(PEER.peer, digest_key=b""))


PROMPT = prompt_of_tokens(range(8))


class Desk:
    """One claim of 8 tokens on a prompt of 8, and the means to answer it; its peer was ``known`` before, or not."""

    def __init__(
        self,
        *,
        lease_opened: float | None = None,
        state: bool = False,
        known: bool = True,
        prompt: Prompt = PROMPT,
        **changes: Any,
    ) -> None:
        self.script, self.known = Script(), KnownPeers()
        if known:
            self.known.pushed(PEER)
        self.claims = Claims(SETTINGS, "d", self.script, self.known)
        sent = prefill(((5, 6),), lease_opened=lease_opened)
        self.claims.begin("r", {**finished_prefill(sent, tp=1, pp=1, dcp=1), **changes}, prompt, state=state)
        found = self.claims.get("r")
        assert found is not None
        self.claim: Claim = found

    def peer(self, answer: Message | Exception, number: int = 0) -> None:
        self._answer(GetPeer, answer, number)

    def lease(self, answer: Message | Exception, number: int = -1) -> None:
        self._answer(LeaseClaim, answer, number)

    def _answer(self, kind: type[Any], answer: Message | Exception, number: int) -> None:
        future = self.script.asked(kind)[number].future
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def advance(self, later: float = 0.0) -> Claim:
        self.claims.advance(self.claim, time.monotonic() + later)
        return self.claim


def claimed(seconds: float, reason: str = "", *, ended: bool = False) -> LeaseClaimed:
    return LeaseClaimed(request_id="p-1", seconds=seconds, reason=reason, ended=ended)


def test_peer_and_lease_are_asked_for_at_once() -> None:
    desk = Desk()
    (peer,), (lease,) = desk.script.asked(GetPeer), desk.script.asked(LeaseClaim)
    assert (peer.message.engine_id, peer.message.generation, peer.message.endpoint.host) == (
        "p",
        GENERATION,
        "h",
    )
    assert (lease.message.key.request_id, lease.message.extend_seconds) == ("p-1", 0.0)
    assert desk.advance().pending


def test_a_claim_is_usable_when_both_have_answered() -> None:
    desk = Desk()
    desk.lease(claimed(20.0))
    assert desk.advance().pending
    desk.peer(PEER)
    claim = desk.advance()
    assert not claim.pending
    assert not claim.cause
    assert claim.lease.valid_until == pytest.approx(claim.lease.asked + 20.0 - SETTINGS.lease_margin)
    assert claim.handshake_seconds == 0.25


def test_a_refused_handshake_is_the_cause_in_kvds_words() -> None:
    desk = Desk()
    refusal = Refused(
        code="KVD-INCOMPATIBLE", message="d cannot read from p: dtype is bf16 here and fp16 there"
    )
    desk.peer(RefusedByDaemon(refusal))
    assert text_of(desk.advance().cause) == f"prefiller p: {refusal.message}"


def test_a_refusal_weighs_more_than_what_was_known_before() -> None:
    desk = Desk()
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
    desk = Desk()
    desk.peer(away)
    desk.lease(claimed(20.0))
    assert not desk.advance().pending
    assert not desk.claim.cause


def test_an_unknown_peer_is_not() -> None:
    desk = Desk(known=False)
    desk.peer(Unreachable("no kvd"))
    assert text_of(desk.advance().cause) == "prefiller p: no kvd"


def test_a_peer_that_is_gone_is_known_no_longer() -> None:
    known = KnownPeers()
    known.pushed(PEER)
    known.pushed(PeerGone(engine_id="p", generation="another", reason=""))
    assert known.fits(prefill(()))
    assert not known.fits(prefill((), generation="another"))
    known.pushed(PeerGone(engine_id="p", generation=GENERATION, reason=""))
    assert not known.fits(prefill(()))


def test_an_answer_of_the_wrong_kind_is_a_cause() -> None:
    desk = Desk()
    desk.peer(Ok())
    assert text_of(desk.advance().cause) == "prefiller p: kvd answered Ok"
    desk = Desk()
    desk.peer(PEER)
    desk.lease(Ok())
    assert text_of(desk.advance().cause) == "lease of request p-1: kvd answered Ok"


def test_an_unknown_lease_is_asked_for_again_a_few_times() -> None:
    """Its announcement may still be on the way."""
    desk = Desk()
    desk.peer(PEER)
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
    desk.peer(PEER)
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
    desk.peer(PEER)
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
    desk.peer(PEER)
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
    desk.peer(BUSY)
    assert desk.advance().pending
    if not known:
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
    desk.peer(PEER)
    desk.claim.began -= 1.1 * KVD_BACK_SECONDS
    desk.lease(AWAY_THERE)
    cause = desk.advance().cause
    said = "whether the blocks of request p-1 are kept cannot be asked: no answer"
    assert (text_of(cause), code_of(cause)) == (said, "PEER_AWAY")


def test_what_was_confirmed_before_kvd_went_away_still_is(away: SessionState) -> None:
    desk = Desk()
    desk.peer(PEER)
    desk.lease(claimed(20.0))
    desk.advance()
    desk.script.state = away
    assert not desk.advance(10.0).pending
    assert not desk.claim.cause


def test_any_other_refusal_of_the_lease_is_the_end() -> None:
    desk = Desk()
    desk.peer(PEER)
    desk.lease(RefusedByDaemon(Refused(code="KVD-NOT-YOUR-ENGINE", message="not yours")))
    assert text_of(desk.advance().cause) == "lease of request p-1: not yours"


def test_nothing_is_waited_for_without_an_end() -> None:
    desk = Desk()
    assert desk.advance(9.9).pending
    cause = desk.advance(10.1).cause
    assert "prefiller p at h:7 was not known within 10 s" in text_of(cause)


def test_a_claim_that_waits_is_renewed_before_it_runs_out() -> None:
    desk = Desk()
    desk.peer(PEER)
    desk.lease(claimed(30.0))
    now = desk.advance().lease.asked
    desk.claims.renew(now + 15.0)
    assert len(desk.script.asked(LeaseClaim)) == 1, "plenty is left"
    desk.claims.renew(now + 25.0)
    desk.claims.renew(now + 25.5)
    (_, asked) = desk.script.asked(LeaseClaim)
    assert asked.message.extend_seconds == 30.0
    asked.answer(claimed(30.0))
    desk.claims.renew(now + 26.0)
    assert desk.claim.lease.valid_until == pytest.approx(now + 25.0 + 30.0 - 0.5)


def test_an_extension_that_fails_takes_nothing_away() -> None:
    desk = Desk()
    desk.peer(PEER)
    desk.lease(claimed(30.0))
    before = desk.advance().lease.valid_until
    desk.claims.renew(before - 1.0)
    desk.lease(Unreachable("no kvd"))
    desk.claims.renew(before - 0.5)
    assert desk.claim.lease.valid_until == before
    assert not desk.claim.cause


def test_a_claim_whose_lease_runs_out_while_it_waits_is_no_claim() -> None:
    desk = Desk()
    desk.peer(PEER)
    desk.lease(claimed(30.0))
    desk.advance()
    assert (
        text_of(desk.advance(31.0).cause)
        == "the lease of request p-1 ran out while this one waited for its turn"
    )


def test_an_end_releases_the_lease_until_kvd_has_taken_it() -> None:
    desk = Desk()
    desk.claims.end(desk.claim, "done")
    (release,) = desk.script.told(LeaseRelease)
    assert (release.key.request_id, release.result) == ("p-1", "done")
    assert desk.claim.state is ClaimState.RELEASED


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


def test_a_request_that_ends_before_its_turn_releases_its_lease_as_aborted() -> None:
    desk = Desk()
    desk.claims.request_over(desk.claim)
    assert [r.result for r in desk.script.told(LeaseRelease)] == ["aborted"]
    assert desk.claims.get("r") is None


def test_a_request_aborted_during_its_load_keeps_its_claim_until_the_load_is_over() -> None:
    desk = Desk()
    desk.claims.order_load(desk.claim)
    desk.claims.request_over(desk.claim)
    assert desk.script.delivered == []
    assert desk.claims.get("r") is desk.claim
    desk.claims.end(desk.claim, "done")
    assert [r.result for r in desk.script.told(LeaseRelease)] == ["done"]
    assert desk.claims.get("r") is None


# --- readers ---


def test_each_claim_is_a_reader_of_its_own_and_stays_the_same_one() -> None:
    desk, other = Desk(), Desk()
    desk.peer(PEER)
    desk.lease(claimed(30.0))
    now = desk.advance().lease.asked
    desk.claims.renew(now + 25.0)
    desk.claims.end(desk.claim, "done")
    asked = [x.message.reader for x in desk.script.asked(LeaseClaim)]
    (released,) = desk.script.told(LeaseRelease)
    assert {*asked, released.reader} == {desk.claim.reader}
    assert len(asked) == 2
    assert other.claim.reader != desk.claim.reader


def test_two_releases_of_one_lease_do_not_replace_each_other() -> None:
    desk = Desk()
    params = finished_prefill(prefill(((5, 6),)), tp=1, pp=1, dcp=1)
    desk.claims.begin("s", params, PROMPT, state=False)
    other = desk.claims.get("s")
    assert other is not None
    for claim in (desk.claim, other):
        desk.claims.end(claim, "done")
    assert len({x.key for x in desk.script.delivered}) == 2


def test_a_claim_is_renewed_while_vllm_does_not_ask_for_it() -> None:
    """It asks for none while all of its places are taken, which may be longer than the lease."""
    desk = Desk()
    desk.peer(PEER)
    desk.lease(claimed(30.0))
    now = desk.claim.lease.asked
    desk.claims.renew(now + 1.0)
    desk.claims.renew(now + 25.0)
    assert desk.script.asked(LeaseClaim)[-1].message.extend_seconds == 30.0


def test_the_card_names_what_is_read() -> None:
    desk = Desk()
    now = desk.claim.lease.asked
    (asked,) = desk.claims.readers(now)
    assert (asked.key.request_id, asked.reader, asked.seconds) == ("p-1", desk.claim.reader, 30.0)
    desk.peer(PEER)
    desk.lease(claimed(20.0))
    desk.advance()
    (usable,) = desk.claims.readers(now)
    assert usable.seconds == pytest.approx(19.5)
    desk.claims.end(desk.claim, "done")
    assert desk.claims.readers(now) == ()


@pytest.mark.parametrize("ended", [True, False])
def test_a_renewal_ends_the_claim_where_the_lease_has_ended(ended: bool) -> None:
    """A kvd that does not know it may have been started just now: what was promised before still is."""
    desk = Desk()
    desk.peer(PEER)
    desk.lease(claimed(30.0))
    now = desk.advance().lease.asked
    desk.claims.renew(now + 25.0)
    desk.lease(claimed(0.0, "released", ended=ended))
    desk.claims.renew(now + 25.5)
    said = "prefiller p no longer keeps blocks of request p-1: released"
    assert text_of(desk.claim.cause) == (said if ended else "")


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
