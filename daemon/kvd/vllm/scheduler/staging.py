"""Staged engines (`kvd.backends.staged`): what peers may read is copied to where they read it before they hear of it.

Of a pull that is at the end of the step which computes the prompt's last token: vLLM hands out a step's result when all
workers have ended it, so the router cannot know of the prefill before. Of a push it is layer by layer, in the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvd.topology.blocks import BlockList, offered
from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.scheduler.pushes import table_in
from kvd.vllm.scheduler.vllm_types import Request, Scheduled, Table
from kvd.worker.orders import StageOrder, plain


@dataclass(slots=True)
class _Prefill:
    """A request that is prefilled here for a pull; ``put`` are its blocks by group, once the workers have the order."""

    request: Request
    put: dict[int, BlockList] = field(default_factory=dict)


class StageOrders:
    """Which prefills end with a step, and with which blocks. Touched by its steps only."""

    def __init__(self, groups: Sequence[GroupFacts], table: Callable[[str], Table | None]) -> None:
        """``table`` gives a request's block ids where a step's output does not."""
        self._groups = tuple(groups)
        self._table = table
        self._active: dict[str, _Prefill] = {}

    def begin(self, request: Request) -> None:
        """A request arrived that is to be prefilled here and pulled."""
        self._active[request.request_id] = _Prefill(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request is one of them."""
        return request_id in self._active

    def take(self, output: Scheduled | None) -> list[StageOrder]:
        """What is to be put out when the coming step has run."""
        found: list[StageOrder] = []
        if output is None:
            return found
        preempted = output.preempted_req_ids or frozenset()
        for request_id, prefill in self._active.items():
            if request_id in preempted:
                prefill.put = {}
            request, count = prefill.request, output.num_scheduled_tokens.get(request_id, 0)
            if prefill.put or not count or request.num_computed_tokens + count < request.num_prompt_tokens:
                continue
            table = table_in(output, request_id, self._table)
            if table is not None:
                prefill.put = self._offered(table)
                found.append(StageOrder(request_id, plain(prefill.put), request.num_prompt_tokens))
        return found

    def finished(self, request_id: str, table: Table) -> bool:
        """A request ended with these blocks. Whether peers can read what they hold of its prompt."""
        prefill = self._active.pop(request_id, None)
        if prefill is None or not prefill.put:
            return False
        total = prefill.request.num_prompt_tokens
        return all(
            self._was_put(index, blocks, prefill.put.get(index), total)
            for index, blocks in self._offered(table).items()
        )

    def _was_put(self, index: int, now: BlockList, put: BlockList | None, total: int) -> bool:
        """Whether all blocks before the prompt's end are those that were put out; a window may have moved on since."""
        if put is None:
            return False
        group = self._groups[index]
        if group.kind == "mamba":
            return now.ids.tolist() == put.ids.tolist()
        end = min(now.first + len(now.ids), -(-total // group.block_size))
        if end <= now.first:
            return True
        ours = now.ids[: end - now.first].tolist()
        return now.first >= put.first and ours == put.ids[now.first - put.first : end - put.first].tolist()

    def _offered(self, table: Table) -> dict[int, BlockList]:
        return {
            index: offered(group.kind, table[index], group.scratch_blocks)
            for index, group in enumerate(self._groups)
        }
