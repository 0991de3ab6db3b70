"""Which blocks hold what: what vLLM's scheduling thread notes, and what another thread is told meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes.cache import HeldPrefix, PrefixCache, WatchedBlock

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


@dataclass
class Pool:
    """VLLM's blocks, as far as they are looked at; ``told`` is whom it tells when it gives one away."""

    hash_block_size: int = BLOCK
    num_gpu_blocks: int = 8
    told: dict[int, Callable[[Any], None]] = field(default_factory=dict)

    def touch(self, blocks: Iterable[Any]) -> None: ...

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        self.told.update((block.block_id, on_reuse) for block in blocks)

    def give_away(self, block: Any) -> None:
        self.told.pop(block.block_id)(block)


@dataclass
class Block:
    block_id: int
    block_hash: bytes | None = None


def hash_of(number: int) -> bytes:
    """With its group, the first, behind it."""
    return bytes([number]) * 32 + bytes(4)


def caching() -> tuple[PrefixCache, Pool]:
    pool = Pool()
    return PrefixCache(SimpleNamespace(coordinator=None, block_pool=pool), [GroupFacts("full", BLOCK)]), pool


def told_of(block: Block, watched: WatchedBlock) -> HeldPrefix:
    return HeldPrefix(BLOCK, ((block.block_id,),), ((block, watched),))


def test_a_block_is_held_from_when_it_is_complete_until_it_is_given_away() -> None:
    (cache, pool), block = caching(), Block(1, hash_of(1))
    (watched,) = cache.watch([block], 0)
    assert not cache.holds(told_of(block, watched)), "nothing of it is computed yet"
    cache.complete(block, watched, BLOCK)
    assert cache.holds(told_of(block, watched))
    assert (len(cache), len(cache.boundaries)) == (1, 1)
    pool.give_away(block)
    assert not cache.holds(told_of(block, watched)), "vLLM takes its hash away a moment later"
    assert (len(cache), len(cache.boundaries)) == (0, 0)


def test_what_was_computed_for_whoever_had_a_block_before_is_not_in_it() -> None:
    (cache, pool), block = caching(), Block(1, hash_of(1))
    (before,) = cache.watch([block], 0)
    pool.give_away(block)
    (now,) = cache.watch([block], 0)
    cache.complete(block, before, BLOCK)
    assert len(cache) == 0
    cache.complete(block, now, BLOCK)
    assert not cache.holds(told_of(block, before))
    assert cache.holds(told_of(block, now))


def test_a_block_that_holds_more_by_now_is_not_the_one_that_a_reader_was_told_of() -> None:
    (cache, _), block = caching(), Block(1, hash_of(1))
    (watched,) = cache.watch([block], 0)
    cache.complete(block, watched, BLOCK)
    block.block_hash = hash_of(2)
    assert not cache.holds(told_of(block, watched))
    cache.complete(block, watched, BLOCK)
    assert not cache.holds(told_of(block, watched))
    assert (len(cache), len(cache.boundaries)) == (1, 1)


def test_a_block_that_two_requests_have_is_watched_once() -> None:
    (cache, pool), block = caching(), Block(1, hash_of(1))
    assert cache.watch([block], 0) == cache.watch([block], 0)
    pool.give_away(block)
    assert not pool.told
