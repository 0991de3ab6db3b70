"""Splitting moves no byte elsewhere and leaves none out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd.topology.descriptors import Descriptors, coalesce, concatenate
from kvd.topology.grid import Grid, Selection
from kvd.topology.split import split_descriptors, split_selection

rows = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(1, 40)), max_size=30)


def descriptors(triples: list[tuple[int, int, int]]) -> Descriptors:
    """Rows that lie apart, so that only what was cut can be joined again."""
    local, remote, length = np.array(triples, np.int64).reshape(-1, 3).T
    apart = np.arange(len(triples)) * 1000
    return Descriptors(local + apart, remote + apart, length)


@given(rows, st.integers(1, 12))
def test_pieces_of_rows_are_the_rows_again_when_joined(
    triples: list[tuple[int, int, int]], pieces: int
) -> None:
    whole = descriptors(triples)
    split = split_descriptors(whole, pieces)
    assert len(split) == min(pieces, whole.nbytes)
    assert all(piece.length.min() > 0 for piece in split)
    again = coalesce(concatenate(split))
    for name in ("local", "remote", "length"):
        assert (getattr(again, name) == getattr(whole, name)).all()


@given(rows, st.integers(1, 12))
def test_sizes_of_pieces_differ_by_one_byte_at_most(triples: list[tuple[int, int, int]], pieces: int) -> None:
    sizes = [piece.nbytes for piece in split_descriptors(descriptors(triples), pieces)]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_rows_that_are_split_stay_as_they_were() -> None:
    whole = descriptors([(0, 5, 10)])
    assert [piece.nbytes for piece in split_descriptors(whole, 2)] == [5, 5]
    assert (whole.local.tolist(), whole.remote.tolist(), whole.length.tolist()) == ([0], [5], [10])


@given(st.integers(0, 50), st.integers(1, 12), st.integers(0, 99))
def test_pieces_of_picks_are_the_same_cells_with_their_bytes(cells: int, pieces: int, seed: int) -> None:
    dice, column = np.random.default_rng(seed), np.arange(4, dtype=np.int64) * 500
    grid = Grid(column, column, dice.integers(1, 90, 4), column + 90, column + 90, 20, 20)
    local = dice.permutation(80)[:cells].astype(np.int32)
    remote = dice.permutation(80)[:cells].astype(np.int32)
    selection = Selection(grid, local, remote, int(grid.length[local // 20].sum()))
    split = split_selection(selection, pieces)
    assert len(split) == min(pieces, cells)
    assert np.concatenate([local[:0], *(piece.local for piece in split)]).tolist() == local.tolist()
    assert np.concatenate([remote[:0], *(piece.remote for piece in split)]).tolist() == remote.tolist()
    assert sum(piece.nbytes for piece in split) == selection.nbytes
    assert all(piece.nbytes == piece.descriptors().nbytes for piece in split)
    assert max(map(len, split), default=0) - min(map(len, split), default=0) <= 1
