"""The prefilling side's leases: kvd ends them, our own clock does when kvd cannot."""

from __future__ import annotations

import time

from kvd.vllm.scheduler.leases import Lease, Leases, longest
from kvd.wire.lease import LeaseClaimed, LeaseClosed, LeaseEnded, LeaseExtend
from kvd.wire.limits import MOST_LEASES_HELD, MOST_LEASES_OPENED
from kvd.wire.registration import OpenLease
from kvd.wire.reply import Ok

GRACE = 5.0


def freed(leases: Leases, now: float) -> tuple[list[str], list[str]]:
    """(freed, of which by our own clock)."""
    closed: list[str] = []
    return leases.take_freed(now, lambda lease: closed.append(lease.request_id)), closed


def opened(now: float = 100.0, seconds: float = 30.0) -> Leases:
    leases = Leases(GRACE)
    leases.open("r", seconds, 4, now)
    return leases


def test_kvd_ends_a_lease_and_the_next_step_frees_it_once() -> None:
    leases = opened()
    assert leases.on_message(LeaseEnded(request_id="r", end="released"), 101.0) is None
    assert freed(leases, 101.0) == (["r"], [])
    assert freed(leases, 101.0) == ([], [])


def test_a_lease_that_ends_twice_is_freed_once() -> None:
    leases = opened()
    leases.on_message(LeaseEnded(request_id="r", end="released"), 101.0)
    leases.on_message(LeaseEnded(request_id="r", end="expired"), 101.0)
    assert freed(leases, 200.0) == (["r"], [])
    leases.on_message(LeaseEnded(request_id="r", end="expired"), 200.0)
    assert freed(leases, 200.0) == ([], [])


def test_the_end_of_an_unknown_lease_is_nothing() -> None:
    leases = opened()
    leases.on_message(LeaseEnded(request_id="other", end="expired"), 101.0)
    assert freed(leases, 101.0) == ([], [])


def test_our_own_clock_waits_out_the_grace() -> None:
    leases = opened()
    assert freed(leases, 130.0 + GRACE) == ([], [])
    assert freed(leases, 130.1 + GRACE) == (["r"], ["r"])


def test_an_extension_counts_from_when_it_arrives_and_never_shortens() -> None:
    leases = opened()
    assert leases.on_message(LeaseExtend(request_id="r", seconds=50.0), 110.0) == LeaseClaimed(
        request_id="r", seconds=50.0
    )
    assert leases.on_message(LeaseExtend(request_id="r", seconds=1.0), 110.0) == LeaseClaimed(
        request_id="r", seconds=50.0
    )
    assert freed(leases, 160.0 + GRACE) == ([], [])


def test_an_ended_lease_cannot_be_extended() -> None:
    leases = opened()
    leases.on_message(LeaseEnded(request_id="r", end="expired"), 101.0)
    for request_id in ("r", "other"):
        assert leases.on_message(LeaseExtend(request_id=request_id, seconds=9.0), 101.0) == LeaseClaimed(
            request_id=request_id, seconds=0.0, reason="the lease has ended"
        )
    assert freed(leases, 102.0) == (["r"], [])


def test_a_kvd_that_starts_anew_learns_what_is_still_held() -> None:
    leases = opened()
    leases.open("s", 10.0, 2, 100.0)
    assert leases.held(115.0) == (OpenLease("r", 15.0, 4, 1), OpenLease("s", 0.0, 2, 2))
    leases.on_message(LeaseEnded(request_id="r", end="released"), 115.0)
    assert leases.held(115.0) == (OpenLease("s", 0.0, 2, 2),), (
        "what ended must not be claimed from the new one"
    )


def test_the_announcement_says_what_remains_when_it_is_sent() -> None:
    leases = opened()
    assert leases.opened_message("e", "r", 112.0).leases == (OpenLease("r", 18.0, 4, 1),)
    leases.on_message(LeaseEnded(request_id="r", end="released"), 112.0)
    assert leases.opened_message("e", "r", 112.0).leases == ()


def test_other_messages_are_not_about_leases() -> None:
    assert opened().on_message(Ok(), 100.0) is None


def test_kvd_is_told_of_a_lease_that_our_clock_ended() -> None:
    leases = opened()
    told: list[Lease] = []
    leases.on_message(LeaseEnded(request_id="r", end="released"), 101.0)
    leases.take_freed(101.0, told.append)
    leases.open("r", 30.0, 4, 102.0)
    leases.take_freed(1000.0, told.append)
    closed = [Leases.closed_message("e", lease) for lease in told]
    assert closed == [LeaseClosed(engine_id="e", request_id="r", end="expired", opening=2)]


def test_a_registration_lists_the_leases_that_last_longest() -> None:
    leases = Leases(GRACE)
    for number in range(MOST_LEASES_HELD + 10):
        leases.open(f"r{number}", 1.0 + number, 1, 100.0)
    held = leases.held(100.0)
    listed = longest(held)
    assert len(listed) == MOST_LEASES_HELD
    assert set(held) - set(listed) == set(held[:10])
    assert leases.opened_message("e", "r3", 101.0).leases == (OpenLease("r3", 3.0, 1, 4),)
    assert leases.opened_message("e", "no", 101.0).leases == ()


def test_what_a_registration_has_no_room_for_is_delivered_after_it() -> None:
    leases = Leases(GRACE)
    for number in range(MOST_LEASES_HELD + 200):
        leases.open(f"r{number}", 1000.0 + number, 1, time.monotonic())
    listed, more = leases.presented("e", time.monotonic())
    assert (len(listed), len(more)) == (MOST_LEASES_HELD, 2)
    leases.on_message(LeaseEnded(request_id="r7", end="released"), time.monotonic())
    messages = [one.message() for one in more]
    assert all(m.held and len(m.leases) <= MOST_LEASES_OPENED for m in messages)
    told = {lease.request_id for m in messages for lease in m.leases}
    assert told == {f"r{n}" for n in range(200)} - {"r7"}, "what ended meanwhile is not told"
    assert {one.key for one in more} == {"held leases 0", "held leases 128"}
    few = opened(time.monotonic())
    assert few.presented("e", time.monotonic())[1] == []
