"""The simulated cache: what its bytes depend on, and that one wrong byte is found."""

from __future__ import annotations

import numpy as np
import pytest

from kvctl.demo.simulated_cache import Cache, bytes_of, fill, first_difference, make_cache
from kvd.geometry.check import check_worker
from kvd.topology.blocks import BlockList


def blocks(*attention: int) -> dict[int, BlockList]:
    ids = ([1], [2], [3], list(attention))
    return {group: BlockList(0, np.array(of, np.int64)) for group, of in enumerate(ids)}


def page_bytes(cache: Cache) -> int:
    return cache.geometry.groups[0].layers[0].stride


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_geometry_is_one_that_kvd_accepts(ranks: int) -> None:
    for rank in range(ranks):
        geometry = make_cache(6, rank, ranks).geometry
        check_worker(geometry)
        assert [group.kind for group in geometry.groups] == ["mamba", "mamba", "mamba", "full"]


def test_what_was_filled_has_no_difference_and_leaves_other_blocks_alone() -> None:
    cache = make_cache(8, 0, 1)
    assert fill(cache, blocks(5, 4), "request-1") == bytes_of(1280)
    assert first_difference(cache, blocks(5, 4), "request-1") == ""
    pages = cache.memory.reshape(2, 8, page_bytes(cache))
    assert not pages[:, [0, 6, 7]].any()


def test_other_requests_and_other_orders_of_blocks_have_other_bytes() -> None:
    cache = make_cache(8, 0, 1)
    fill(cache, blocks(5, 4), "request-1")
    assert "model.layers.0.linear_attn, conv.q, block 0" in first_difference(cache, blocks(5, 4), "request-2")
    assert "model.layers.3.self_attn, k, block 0" in first_difference(cache, blocks(4, 5), "request-1")


def test_any_one_wrong_byte_is_found_and_named() -> None:
    cache = make_cache(8, 0, 1)
    fill(cache, blocks(5), "request-1")
    layer = cache.geometry.groups[3].layers[1]
    at = layer.offset + 5 * layer.stride + 12345
    cache.memory[at] ^= 1
    found = first_difference(cache, blocks(5), "request-1")
    assert found.startswith("model.layers.7.self_attn, ")
    cache.memory[at] ^= 1
    assert first_difference(cache, blocks(5), "request-1") == ""


def test_two_ranks_hold_what_one_rank_holds() -> None:
    whole = make_cache(8, 0, 1)
    halves = [make_cache(8, rank, 2) for rank in range(2)]
    for cache in (whole, *halves):
        fill(cache, blocks(5), "request-1")
    attention = [cache.memory.reshape(2, 8, -1)[0, 5] for cache in (whole, *halves)]
    # Heads stand outermost in a page, so the ranks' halves follow each other.
    assert np.array_equal(attention[0], np.concatenate(attention[1:]))
