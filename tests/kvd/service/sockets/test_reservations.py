"""Bytes of large frames: shares, turns, and nobody who waits for ever."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType

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


def test_of_a_process_and_of_a_user_nobody_overtakes() -> None:
    made = Reservations()
    taken = [made.ask((1, 1), INCOMING_PROCESS_BYTES, never), made.ask((1, 2), 8 * MB, never)]
    told: list[str] = []
    made.ask((1, 1), 2 * MB, lambda: told.append("process, large"))
    made.ask((1, 1), 1, lambda: told.append("process, small"))
    of_user = made.ask((1, 3), 9 * MB, lambda: told.append("user, large"))
    made.ask((1, 4), 1, lambda: told.append("user, small"))
    other = made.ask((2, 5), MB, never)
    assert (other.granted, told) == (True, [])
    of_user.release()
    assert told == ["user, small"]
    taken[0].release()
    assert told == ["user, small", "process, large", "process, small"]


def test_who_was_granted_something_asks_again_at_once() -> None:
    made = Reservations()
    taken = made.ask((1, 1), INCOMING_USER_BYTES, never)
    told: list[str] = []

    def go_on() -> None:
        told.append("second")
        second.release()
        made.ask((1, 1), INCOMING_USER_BYTES, lambda: told.append("third"))

    second = made.ask((1, 1), MB, go_on)
    taken.release()
    assert told == ["second", "third"]
    assert made.total == INCOMING_USER_BYTES


def test_ten_thousand_clients_of_one_user_cost_what_each_costs_alone() -> None:
    """A fleet comes back after kvd was started again: a card of 12 KB from each worker of one user."""
    clients, size = 10_000, 12_000
    made = Reservations()
    coming: list[int] = []
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        holds = [made.ask((1, pid), size, partial(coming.append, pid)) for pid in range(clients)]
        at_once = sum(hold.granted for hold in holds)
        for hold in holds:
            hold.release()
    finally:
        sys.setprofile(before)
    assert at_once == INCOMING_USER_BYTES // size
    assert coming == list(range(at_once, clients))
    assert made.total == 0
    assert calls < 100 * clients
