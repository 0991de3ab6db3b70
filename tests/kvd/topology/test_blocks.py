"""Which blocks a reader wants and a prefiller offers, group by group."""

from __future__ import annotations

import pytest

from kvd.geometry.model import GroupKind
from kvd.topology.blocks import BlockList, first_needed, offered, wanted


def plain(blocks: BlockList) -> tuple[int, list[int]]:
    return blocks.first, blocks.ids.tolist()


@pytest.mark.parametrize(
    ("kind", "window", "tokens", "computed", "first"),
    [
        ("full", None, 100, 0, 0),
        ("full", None, 100, 48, 3),
        ("full", None, 100, 50, 3),  # a block that is known in part is read whole
        ("mla", None, 100, 16, 1),
        ("sliding_window", 32, 100, 0, 4),  # token 99 looks back to 68, in block 4
        ("sliding_window", 32, 20, 0, 0),
        ("sliding_window", 32, 100, 90, 5),
        ("chunked", 64, 100, 0, 4),  # token 99 is in the chunk that begins at 64
        ("chunked", 64, 65, 0, 4),
        ("chunked", 64, 64, 0, 0),
    ],
)
def test_the_first_block_that_a_reader_needs(
    kind: GroupKind, window: int | None, tokens: int, computed: int, first: int
) -> None:
    assert first_needed(kind, 16, window, tokens=tokens, computed=computed) == first


def test_a_reader_wants_the_blocks_of_the_tokens_it_lacks() -> None:
    ids = [11, 12, 13, 14, 15]
    assert plain(wanted("full", 16, None, ids, tokens=50, computed=16)) == (1, [12, 13, 14])


def test_blocks_beyond_the_tokens_are_for_what_is_computed_here() -> None:
    assert plain(wanted("full", 16, None, [1, 2, 3], tokens=32, computed=0)) == (0, [1, 2])
    assert plain(wanted("full", 16, None, [1, 2, 3], tokens=33, computed=0)) == (0, [1, 2, 3])


def test_null_blocks_before_a_window_are_not_read_into() -> None:
    assert plain(wanted("sliding_window", 16, 64, [0, 0, 0, 8, 9], tokens=80, computed=0)) == (3, [8, 9])
    assert plain(wanted("sliding_window", 16, 64, [5, 6, 7, 8, 9], tokens=80, computed=0)) == (
        1,
        [6, 7, 8, 9],
    )


def test_a_prefiller_offers_what_is_left_behind_the_nulls() -> None:
    assert plain(offered("sliding_window", [0, 0, 7, 8])) == (2, [7, 8])
    assert plain(offered("full", [3, 4])) == (0, [3, 4])
    assert plain(offered("sliding_window", [0, 0])) == (2, [])


def test_of_a_state_only_the_running_block_moves() -> None:
    """Earlier blocks are checkpoints, later ones are scratch for speculation."""
    assert plain(offered("mamba", [0, 0, 7])) == (0, [7])
    assert plain(offered("mamba", [0, 7, 91, 92], scratch_blocks=2)) == (0, [7])
    assert plain(offered("mamba", [7], scratch_blocks=2)) == (0, [7])
    assert plain(wanted("mamba", 640, None, [0, 5, 91], tokens=700, computed=640, scratch_blocks=1)) == (
        0,
        [5],
    )


def test_a_state_that_is_not_there_is_not_offered() -> None:
    assert plain(offered("mamba", [7, 0])) == (0, [])
    assert plain(offered("mamba", [])) == (0, [])
