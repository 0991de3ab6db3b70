"""What `prefixes` takes of vLLM 0.32, for 0.26: a scheduler for measurements on machines that have no later one.

An engine takes it with `scheduler_cls` `benchmarks.gpu.prefix_seam.PrefixScheduler`, and with this module as its
`kv_connector_module_path`. Nobody is to deploy it: it was tried with one prompt at a time, and with nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core import kv_cache_utils

from kvd.vllm import KvdConnector
from kvd.vllm.early import EarlyScheduler

__all__ = ["KvdConnector", "PrefixScheduler"]


def _seed_of_all(_function: object) -> str:
    """What vLLM 0.26 makes the first block's hash with, if it is set, whatever the algorithm."""
    return os.environ["PYTHONHASHSEED"]


if not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
    kv_cache_utils.resolve_none_hash_seed = _seed_of_all


class PrefixScheduler(EarlyScheduler):
    """That of an engine with one worker. The connector is given the cache, and told of blocks that are given away."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tell_of_reuse(self.kv_cache_manager.block_pool)
        self.connector.bind_kv_cache_manager(self.kv_cache_manager)


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
