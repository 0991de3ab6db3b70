"""What another thread is told while vLLM's scheduling thread changes the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes.cache import PrefixCache

BLOCK = 16


@pytest.mark.parametrize("error", [StopIteration(), RuntimeError("dictionary changed size during iteration")])
def test_a_block_that_is_given_away_while_it_is_looked_up_is_held_by_nobody(error: Exception) -> None:
    def walked_over(_hash: bytes, _groups: list[int]) -> list[Any]:
        raise error

    pool = SimpleNamespace(
        hash_block_size=BLOCK, num_gpu_blocks=8, unpin_blocks=None, get_cached_block=walked_over
    )
    cache = PrefixCache(SimpleNamespace(coordinator=None, block_pool=pool), [GroupFacts("full", BLOCK)])
    assert cache.holders_of(bytes(32)) == (0,)
