"""Which blocks vLLM took back lately: a step that the device has not done yet may still read or write them.

With asynchronous scheduling and with pipelines a step is scheduled while others are under way. Where a load goes into
blocks that no request had lately, it need not wait for those (`kvd.worker.step_loads`). A step touches the blocks of
its own requests alone. So a block that is free before a step is scheduled, and then given to a load, is not touched by
that step nor by later ones. A block that is taken back while a step is scheduled counts as taken back before it: vLLM
may give it to requests of that very step. A load among them waits for the earlier steps.

vLLM has a fence of its own: it takes a finished request's blocks back after the steps that were under way. But a layer
with a window gives blocks up while a step reads them, and what a step does after its tokens are sampled (a drafter, a
state that is copied) may come after that fence.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from kvd.vllm.vllm_types import changes_blocks, changes_some, leave_unzeroed
from kvd.worker.orders import LoadOrder

KEPT = 16
"""Steps for which it is remembered what was taken back. Of a block of before, that many steps ago counts."""
MARKED = 8
"""One of so many steps is marked in any case: a load into blocks that were free for long waits for old steps only."""


class FreedBlocks:
    """Touched while vLLM schedules, and takes results, which is one thread."""

    def __init__(self) -> None:
        self._step = 0
        self._freed: deque[tuple[int, frozenset[int]]] = deque()
        self._pool: Any = None

    def watch(self, pool: Any) -> None:
        """Take note of what is taken back into ``pool``, vLLM's BlockPool."""
        free = pool.free_blocks

        def noted(blocks: Iterable[Any]) -> None:
            gone = list(blocks)
            self._freed.append((self._step, frozenset(block.block_id for block in gone)))
            free(gone)

        pool.free_blocks = noted
        self._pool = pool

    def spares(self, count: int, under_way: int) -> bool:
        """Whether the blocks that vLLM gives next are so many that none of the steps ``under_way`` may touch.

        Blocks without a hash that were taken back come first, those with one last.
        """
        if self._pool is None or self._pool.get_num_free_blocks() < count:
            return False
        lately = frozenset[int]().union(
            *(freed for step, freed in self._freed if step > self._step - under_way)
        )
        # vLLM's queue is not public: where there is none, nobody knows what comes next.
        head = getattr(getattr(self._pool, "free_block_queue", None), "fake_free_list_head", None)
        return not lately or (head is not None and lately.isdisjoint(_behind(head, count)))

    def last_use(self, blocks: AbstractSet[int]) -> int | None:
        """The last step that may touch ``blocks`` which vLLM had free and gives to a load now; None where any may."""
        if self._pool is None:
            return None
        lately = (step for step, freed in self._freed if not freed.isdisjoint(blocks))
        return max(lately, default=self._step - KEPT)

    def scheduled(self, loads: list[LoadOrder], output: object) -> tuple[int, bool, list[LoadOrder]]:
        """The number of the step that was scheduled, 0 where nothing is known of blocks; whether it is to be marked.

        It is to be where a block was taken back since the step before it, and every `MARKED` steps. And its loads,
        which wait for more where it changes blocks itself.
        """
        if self._pool is None:
            return 0, False, loads
        freed = bool(self._freed) and self._freed[-1][0] == self._step
        marked = freed or self._step % MARKED == 0
        self._step += 1
        while self._freed and self._freed[0][0] <= self._step - KEPT:
            self._freed.popleft()
        if loads and changes_some(output):
            loads = [_beside_changes(order, output) for order in loads]
        return self._step, marked, loads


def _beside_changes(order: LoadOrder, output: object) -> LoadOrder:
    """A load of a step that changes blocks beforehand: it may ignore no step where they are its own.

    Those of one that the step uses are left alone.
    """
    blocks = order.block_ids
    if order.in_step:
        leave_unzeroed(output, blocks)
    return dataclasses.replace(order, after=None) if changes_blocks(output, blocks) else order


def _behind(head: Any, count: int) -> Iterator[int]:
    """The ids of the first blocks of vLLM's queue."""
    block = head.next_free_block
    for _ in range(count):
        if block is None:
            return
        yield block.block_id
        block = block.next_free_block
