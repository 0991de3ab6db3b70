"""How much of an engine's time reads of its cache may cost."""

from __future__ import annotations

import pytest

from kvd.vllm.prefixes.allowance import LONGEST, MOST_SAVED, Allowance


def test_what_was_taken_comes_back_by_and_by() -> None:
    allowance = Allowance(0.01, 100.0)
    allowance.take(MOST_SAVED + 0.05, 100.0)
    assert allowance.left(100.0) == pytest.approx(-0.05)
    assert allowance.left(104.0) == pytest.approx(-0.01)
    assert allowance.left(106.0) == pytest.approx(0.01)


def test_no_more_than_a_little_is_saved() -> None:
    allowance = Allowance(0.01, 100.0)
    assert allowance.left(1e6) == MOST_SAVED
    allowance.take(2 * MOST_SAVED, 1e6)
    assert allowance.left(1e6) == pytest.approx(-MOST_SAVED)


def test_over_a_long_time_reads_cost_no_more_than_their_share() -> None:
    allowance, now, cost = Allowance(0.005, 0.0), 0.0, 0.0
    while now < 1000.0:
        now += 0.1
        if allowance.left(now) > 0:
            allowance.take(0.007, now)
            cost += 0.007
    assert cost <= 0.005 * now + MOST_SAVED + 0.007
    assert cost >= 0.9 * 0.005 * now


def test_no_read_keeps_others_waiting_for_more_than_ten_minutes() -> None:
    allowance = Allowance(0.005, 0.0)
    allowance.take(100.0, 0.0)
    assert allowance.left(LONGEST - 1.0) < 0 < allowance.left(LONGEST + 1.0)
