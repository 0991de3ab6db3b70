"""Bytes of large frames: shares, turns, and nobody who waits for ever."""

from __future__ import annotations

from kvd.service.sockets.limits import INCOMING_BYTES, INCOMING_PROCESS_BYTES, INCOMING_USER_BYTES
from kvd.service.sockets.reservations import Reservations

MB = 1 << 20


def never() -> None:
    raise AssertionError("granted at once, and told of it again")


def test_a_process_and_a_user_have_shares_and_get_back_what_they_release() -> None:
    made = Reservations()
    first = made.ask((1, 1), INCOMING_PROCESS_BYTES, never)
    assert first.granted
    told: list[str] = []
    second = made.ask((1, 1), MB, lambda: told.append("second"))
    other_process = made.ask((1, 2), INCOMING_USER_BYTES - INCOMING_PROCESS_BYTES, never)
    over_the_user = made.ask((1, 3), MB, lambda: told.append("over the user"))
    other_user = made.ask((2, 4), MB, never)
    assert (second.granted, other_process.granted, over_the_user.granted) == (False, True, False)
    assert other_user.granted
    first.release()
    first.release()
    assert sorted(told) == ["over the user", "second"]
    for hold in (second, other_process, over_the_user, other_user):
        hold.release()
    assert made.total == 0


def test_a_frame_larger_than_all_shares_comes_alone_and_is_not_overtaken() -> None:
    made = Reservations()
    small = made.ask((1, 1), MB, never)
    told: list[str] = []
    huge = made.ask((2, 2), INCOMING_BYTES, lambda: told.append("huge"))
    late = made.ask((3, 3), MB, lambda: told.append("late"))
    assert (huge.granted, late.granted) == (False, False)
    small.release()
    assert told == ["huge"]
    huge.release()
    assert told == ["huge", "late"]


def test_who_gives_up_its_wish_gets_nothing() -> None:
    made = Reservations()
    whole = made.ask((1, 1), INCOMING_BYTES, never)
    made.ask((2, 2), MB, never).release()
    whole.release()
    assert made.total == 0
