"""Columns in steps that keep Python's lock give what numpy gives at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvd.topology.columns import KEPT, column_of, distinct, fill, largest, narrow


@pytest.mark.parametrize("count", [1, KEPT, KEPT + 1, 3 * KEPT + 7])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_the_largest_is_found_wherever_it_is(count: int, kind: Any) -> None:
    column = np.arange(count, dtype=kind)
    assert largest(column) == largest(column[::-1]) == count - 1


@pytest.mark.parametrize(("kind", "bits"), [(np.int32, 32), (np.int64, 64)])
def test_a_negative_one_is_larger_than_all_others(kind: Any, bits: int) -> None:
    assert largest(np.array([5, -2, 1 << 30], kind)) == (1 << bits) - 2


@pytest.mark.parametrize("count", [0, 1, KEPT, 2 * KEPT + 3])
def test_narrow_columns_have_the_same_numbers(count: int) -> None:
    column = np.arange(count, dtype=np.int64)[::-1]
    assert narrow(column).dtype == np.int32
    assert (narrow(column) == column).all()
    target = np.full(count, -1, np.int64)
    fill(target, column)
    assert (target == column).all()


@pytest.mark.parametrize("count", [2, KEPT + 1, 3 * KEPT + 7])
@pytest.mark.parametrize("blocks", [1, 10, 1 << 20])
def test_a_number_that_is_there_twice_is_found_wherever_it_is(count: int, blocks: int) -> None:
    column = np.random.default_rng(count).permutation(count)
    column[0] += count * blocks
    assert distinct(column, largest(column))
    column[-1] = column[0]
    assert not distinct(column, largest(column))
    column -= column.min() + 1
    assert not distinct(column, largest(column)), "one of them may be negative"


@pytest.mark.parametrize("count", [0, 1, KEPT + 1])
def test_a_column_of_numbers_can_be_written_to(count: int) -> None:
    column = column_of(tuple(range(count)))
    assert column.dtype == np.int64
    assert column.tolist() == list(range(count))
    column[:] = 1
