"""The intervals that benchmarks/data_path gives with its ratios."""

from collections import Counter
from functools import partial
from itertools import pairwise, permutations

import numpy as np
import pytest

from benchmarks.data_path import outside, ratio, timed


@pytest.mark.parametrize(("rounds", "out"), [(1, 0), (5, 0), (6, 0), (9, 1), (15, 3), (41, 13), (100, 39)])
def test_the_interval_leaves_out_what_tables_of_the_sign_test_say(rounds: int, out: int) -> None:
    assert outside(rounds) == out


def test_the_interval_holds_the_true_median_19_times_of_20_whatever_the_distribution() -> None:
    dice = np.random.default_rng(5)
    held = 0
    for _ in range(1000):
        theirs = np.exp(dice.standard_cauchy(25).clip(-20, 20))  # median 1, and no mean to speak of
        found = ratio(theirs.tolist(), [1.0] * 25)
        assert found["low"] <= found["median"] <= found["high"]
        held += found["low"] <= 1 <= found["high"]
    assert held >= 930


def test_each_way_follows_each_other_one_equally_often_in_as_many_rounds_as_there_are_orders() -> None:
    called: list[str] = []
    seconds = timed({name: partial(called.append, name) for name in "abcd"}, 24)
    assert {len(values) for values in seconds.values()} == {24}
    orders = [called[at : at + 4] for at in range(0, len(called), 4)]
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert set(pairs) == set(permutations("abcd", 2))
    assert set(pairs.values()) == {6}
