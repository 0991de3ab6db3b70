"""What `prefixes` takes of vLLM 0.32, for 0.26: a connector for measurements on machines that have no later one.

An engine takes it with this module as its `kv_connector_module_path`. Nobody is to deploy it: it was tried with one
prompt at a time, and with nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import scheduler

from kvd.vllm import KvdConnector as Shipped

__all__ = ["KvdConnector"]

_managers: list[Any] = []
_made = scheduler.KVCacheManager


def _remembered(*args: Any, **kwargs: Any) -> Any:
    """The scheduler's KVCacheManager, which 0.26 shows no connector."""
    _managers.append(_made(*args, **kwargs))
    return _managers[-1]


def _seed_of_all(_function: object) -> str:
    """What vLLM 0.26 makes the first block's hash with, if it is set, whatever the algorithm."""
    return os.environ["PYTHONHASHSEED"]


if not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
    kv_cache_utils.resolve_none_hash_seed = _seed_of_all
    # A scheduler makes its connector first, which has this module imported, and then what this replaces.
    scheduler.KVCacheManager = _remembered


class KvdConnector(Shipped):  # type: ignore[misc]
    """Ours, which is given the cache, and told of each block of it that is given away."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The blocks are there, and so is what vLLM 0.32 would give a connector."""
        super().bind_gpu_block_pool(gpu_block_pool)
        tell_of_reuse(gpu_block_pool)
        self.bind_kv_cache_manager(next(one for one in _managers if one.block_pool is gpu_block_pool))


def tell_of_reuse(pool: Any) -> None:
    """Give a BlockPool of vLLM 0.26 the `unpin_blocks` of 0.32."""
    told: dict[int, Callable[[Any], None]] = {}
    give, forget = pool.get_new_blocks, pool.reset_prefix_cache

    def unpin_blocks(blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        let_go = []
        for block in blocks:
            told[block.block_id] = on_reuse
            block.ref_cnt -= 1
            if not block.ref_cnt:
                let_go.append(block)
        pool.free_block_queue.append_n(let_go)

    def get_new_blocks(count: int) -> list[Any]:
        given: list[Any] = give(count)
        for block in given:
            if (on_reuse := told.pop(block.block_id, None)) is not None:
                on_reuse(block)
        return given

    def reset_prefix_cache() -> bool:
        done = bool(forget())
        for number in list(told) if done else ():
            told.pop(number)(pool.blocks[number])
        return done

    pool.unpin_blocks = unpin_blocks
    pool.get_new_blocks = get_new_blocks
    pool.reset_prefix_cache = reset_prefix_cache
