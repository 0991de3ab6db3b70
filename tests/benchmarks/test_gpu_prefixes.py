"""What benchmarks/gpu adds to vLLM 0.26 to read prefixes there, beside what vLLM 0.32 has of its own; and its table."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from benchmarks.gpu.transfer_tables import prefixes

MILLISECONDS = 1e-3


@pytest.fixture(scope="module")
def vllm() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: there is no pool of blocks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.async_scheduler  # noqa: F401 - warns once, here


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("earlier", [False, True], ids=["its own", "added"])
def test_whoever_let_go_of_a_block_is_told_when_it_is_given_away(earlier: bool) -> None:
    pool = block_pool(earlier=earlier)
    told: list[int] = []

    def given_away(block: Any) -> None:
        told.append(block.block_id)

    first, second = pool.get_new_blocks(2)
    pool.touch([first])
    pool.unpin_blocks([first, second], given_away)
    assert (first.ref_cnt, second.ref_cnt, pool.get_num_free_blocks()) == (1, 0, 2)
    pool.free_blocks([first])
    assert not told
    given = [block.block_id for block in pool.get_new_blocks(3)]
    assert told == [one for one in given if one in (first.block_id, second.block_id)]
    assert len(told) == 2


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("earlier", [False, True], ids=["its own", "added"])
def test_all_are_told_when_the_cache_is_reset(earlier: bool) -> None:
    pool = block_pool(earlier=earlier)
    told: list[int] = []
    pool.unpin_blocks(pool.get_new_blocks(2), lambda block: told.append(block.block_id))
    assert pool.reset_prefix_cache()
    assert sorted(told) == [1, 2]


def test_a_prefix_is_held_against_computing_it_by_the_same_engines() -> None:
    lines = [
        {
            "what": "prefix", "run": 1, "note": "steady", "gpus": ("0", "1"), "kind": "dense", "block": 16,
            "tokens": 512, "way": "direct", "joined": True, "equal": True,
            "computed": {"seconds": 10 * MILLISECONDS, "cached": 0},
            "read": {"seconds": read * MILLISECONDS, "cached": 496},
            "held there": {"seconds": 3 * MILLISECONDS, "cached": 496},
        }
        for read in (2, 4, 9)
    ]  # fmt: skip
    assert prefixes(lines).splitlines()[2] == (
        "| 2 GPUs | dense | 16 | 512 | direct | by block | 3 | 496 | 10.0 ms | 4.00 ms | 0.40 | 3.00 ms | 3 of 3 |"
    )


def block_pool(*, earlier: bool) -> Any:
    """Three blocks and the null block; an ``earlier`` pool tells what it gives away as the benchmark has it told."""
    from vllm.v1.core.block_pool import BlockPool

    from benchmarks.gpu import prefix_seam

    pool: Any = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
    if earlier:
        pool.unpin_blocks = None
        prefix_seam.tell_of_reuse(pool)
    return pool
