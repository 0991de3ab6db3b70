"""How long a claim is held: its renewals, its readers, and the end that releases its lease."""

from __future__ import annotations

import pytest

from kvd.client.errors import Unreachable
from kvd.vllm.params import finished_prefill
from kvd.vllm.scheduler.claim import ClaimState
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.worker.cause import text_of
from tests.support.rigs.bench import prefill
from tests.support.rigs.desk import PROMPT, Desk, claimed


def test_a_claim_that_waits_is_renewed_before_it_runs_out() -> None:
    desk = Desk()
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
    desk.lease(claimed(30.0))
    before = desk.advance().lease.valid_until
    desk.claims.renew(before - 1.0)
    desk.lease(Unreachable("no kvd"))
    desk.claims.renew(before - 0.5)
    assert desk.claim.lease.valid_until == before
    assert not desk.claim.cause


def test_a_claim_whose_lease_runs_out_while_it_waits_is_no_claim() -> None:
    desk = Desk()
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
    desk.lease(claimed(30.0))
    now = desk.claim.lease.asked
    desk.claims.renew(now + 1.0)
    desk.claims.renew(now + 25.0)
    renewal = desk.script.asked(LeaseClaim)[-1].message
    assert (renewal.extend_seconds, renewal.generation) == (30.0, ""), "no load waits for its answer"


def test_the_card_names_what_is_read() -> None:
    desk = Desk()
    now = desk.claim.lease.asked
    (asked,) = desk.claims.readers(now)
    assert (asked.key.request_id, asked.reader, asked.seconds) == ("p-1", desk.claim.reader, 30.0)
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
    desk.lease(claimed(30.0))
    now = desk.advance().lease.asked
    desk.claims.renew(now + 25.0)
    desk.lease(claimed(0.0, "released", ended=ended))
    desk.claims.renew(now + 25.5)
    said = "prefiller p no longer keeps blocks of request p-1: released"
    assert text_of(desk.claim.cause) == (said if ended else "")
