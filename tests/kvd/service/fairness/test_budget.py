"""Shares of what all have together, and tallies of who has what."""

from __future__ import annotations

from kvd.service.fairness.budget import ALL, Budget, FairShare
from kvd.service.fairness.tally import Tally, beyond


def shares(user: str) -> tuple[FairShare, FairShare]:
    return FairShare(user, "of this user", 2, 100), FairShare(ALL, "in all", 3, 150)


def filled(*things: tuple[str, int]) -> Budget:
    """A budget in which these are, each a user's and of a size."""
    budget = Budget("requests", "bytes")
    for user, size in things:
        assert not budget.full(shares(user), size)
        budget.take(shares(user), size)
    return budget


def test_who_has_as_many_as_a_share_holds_is_told_so_and_nobody_else_is() -> None:
    budget = filled(("anna", 10), ("anna", 20))
    assert budget.full(shares("anna"), 1) == (
        "2 requests of this user with 30 bytes wait already, at most 2 and 100 bytes may"
    )
    assert budget.full(shares("otto"), 1) == ""


def test_the_share_of_all_bounds_those_that_have_room_in_their_own() -> None:
    budget = filled(("anna", 1), ("anna", 1), ("otto", 1))
    assert "3 requests in all" in budget.full(shares("eva"), 1)


def test_sizes_are_bounded_and_what_is_larger_than_a_share_comes_alone() -> None:
    budget = filled(("anna", 1000))
    assert "1000 bytes wait already" in budget.full(shares("anna"), 1)
    assert "in all" in budget.full(shares("otto"), 1)
    budget.give_back(shares("anna"), 1000)
    assert not budget.full(shares("otto"), 1000)


def test_a_share_without_a_bound_in_one_of_both_says_the_other() -> None:
    budget = filled(("anna", 10))
    assert budget.full([FairShare("anna", "of anna", most=1)], 1) == (
        "1 requests of anna with 10 bytes wait already, at most 1 may"
    )
    assert budget.full([FairShare("anna", "of anna", size=10)], 1) == (
        "1 requests of anna with 10 bytes wait already, at most 10 bytes may"
    )
    assert budget.fits(FairShare("anna", "of anna"), 10**9)


def test_who_has_nothing_any_more_is_not_remembered() -> None:
    budget = filled(("anna", 10), ("otto", 20))
    for user, size in (("anna", 10), ("otto", 20)):
        budget.give_back(shares(user), size)
    assert (budget.counts.of, budget.sizes.of) == ({}, {})


def test_a_tally_has_the_total_of_all() -> None:
    tally: Tally[str] = Tally()
    tally.add("a")
    tally.add("b", 5)
    tally.add("b", -2)
    assert (tally["a"], tally["b"], tally["c"], tally.total) == (1, 3, 0, 4)
    tally.add("b", -3)
    assert tally.of == {"a": 1}


def test_more_than_a_user_or_all_users_may_have_is_said_with_both_numbers() -> None:
    users: Tally[int] = Tally()
    users.add(1, 9)
    users.add(2, 3)
    assert beyond(users, "engines", 1, 1, (10, 13)) == ""
    assert beyond(users, "engines", 1, 2, (10, 20)) == "uid 1 has 9 engines, at most 10 are kept"
    assert beyond(users, "engines", 2, 2, (10, 13)) == "all users have 12 engines, at most 13 are kept"
