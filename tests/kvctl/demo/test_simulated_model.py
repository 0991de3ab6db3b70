"""The simulated engines' KV cache: what its bytes depend on, and that one wrong byte is found."""

from __future__ import annotations

import numpy as np
import pytest

from kvctl.bench.memory import Memory, place
from kvctl.bench.pattern import fill, first_difference
from kvctl.demo.simulated_model import BLOCK_TOKENS, simulated_geometry
from kvd.geometry.check import check_worker
from kvd.topology.blocks import BlockList


def blocks(*attention: int) -> dict[int, BlockList]:
    ids = ([1], [2], [3], list(attention))
    return {group: BlockList(0, np.array(of, np.int64)) for group, of in enumerate(ids)}


def memory_of(rank: int, ranks: int) -> Memory:
    return place(simulated_geometry("engine", ranks, 8).workers[rank])


def difference(memory: Memory, there: dict[int, BlockList], request: str) -> str:
    return first_difference(memory, there, request, 2 * BLOCK_TOKENS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_geometry_is_one_that_kvd_accepts(ranks: int) -> None:
    for rank in range(ranks):
        geometry = memory_of(rank, ranks).geometry
        check_worker(geometry)
        assert [group.kind for group in geometry.groups] == ["mamba", "mamba", "mamba", "full"]
        assert geometry.groups[3].block_size == BLOCK_TOKENS


def test_what_was_filled_has_no_difference_and_leaves_other_blocks_alone() -> None:
    memory = memory_of(0, 1)
    fill(memory, blocks(5, 4), "request-1")
    assert difference(memory, blocks(5, 4), "request-1") == ""
    pages = memory.regions[0].reshape(2, 8, -1)
    assert not pages[:, [0, 6, 7]].any()


def test_other_requests_and_other_orders_of_blocks_have_other_bytes() -> None:
    memory = memory_of(0, 1)
    fill(memory, blocks(5, 4), "request-1")
    assert difference(memory, blocks(5, 4), "request-2").startswith(
        "model.layers.0.linear_attn, conv.q, block 0"
    )
    assert difference(memory, blocks(4, 5), "request-1").startswith(
        "model.layers.3.self_attn.attn, k, block 0"
    )


def test_any_one_wrong_byte_is_found_and_named() -> None:
    memory = memory_of(0, 1)
    fill(memory, blocks(5), "request-1")
    layer = memory.geometry.groups[3].layers[1]
    at = layer.offset + 5 * layer.stride + 12345
    memory.regions[layer.region][at] ^= 1
    assert difference(memory, blocks(5), "request-1").startswith("model.layers.7.self_attn.attn, ")
    memory.regions[layer.region][at] ^= 1
    assert difference(memory, blocks(5), "request-1") == ""


def test_two_ranks_hold_what_one_rank_holds() -> None:
    memories = [memory_of(0, 1), memory_of(0, 2), memory_of(1, 2)]
    for memory in memories:
        fill(memory, blocks(5), "request-1")
    attention = [memory.regions[0].reshape(2, 8, -1)[0, 5] for memory in memories]
    # Heads stand outermost in a page, so the ranks' halves follow each other.
    assert np.array_equal(attention[0], np.concatenate(attention[1:]))
