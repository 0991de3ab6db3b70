"""Which prompts a step computes to their end, and in which blocks.

vLLM hands out a step's result when all workers have ended it. So no decoder knows of a prefill before the workers have
processed its blocks: staged engines (`kvd.backends.staged`) copy them, others add up their KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.topology.blocks import BlockList
from kvd.vllm.memory.groups import GroupFacts, offered_by_group
from kvd.vllm.vllm_types import BlockTable, VllmRequest, VllmStep, table_in
from kvd.worker.orders import Blocks, plain


class CompletedPrefill(NamedTuple):
    """A prompt of ``tokens`` that a step computes to its end, with its blocks by group index."""

    request_id: str
    groups: dict[int, Blocks]
    tokens: int


@dataclass(slots=True)
class _Prefill:
    """A request that is prefilled here; ``blocks`` are its own by group, once a step that completes it was ordered."""

    request: VllmRequest
    blocks: dict[int, BlockList] = field(default_factory=dict)


class CompletedPrefills:
    """The prefills of one engine that are watched. Touched by the scheduler's step only."""

    def __init__(self, groups: Sequence[GroupFacts], table: Callable[[str], BlockTable | None]) -> None:
        """``table`` gives a request's block ids where a step's output does not."""
        self._groups = tuple(groups)
        self._table = table
        self._active: dict[str, _Prefill] = {}

    def begin(self, request: VllmRequest) -> None:
        """A request arrived that is to be prefilled here."""
        self._active[request.request_id] = _Prefill(request)

    def knows(self, request_id: str) -> bool:
        """Whether a request is one of them."""
        return request_id in self._active

    def take(self, output: VllmStep | None) -> list[CompletedPrefill]:
        """The prompts that are complete when the coming step has run."""
        found: list[CompletedPrefill] = []
        if output is None or not self._active:
            return found
        preempted = output.preempted_req_ids or frozenset()
        for request_id, prefill in self._active.items():
            if request_id in preempted:
                prefill.blocks = {}
            request, count = prefill.request, output.num_scheduled_tokens.get(request_id, 0)
            if prefill.blocks or not count or request.num_computed_tokens + count < request.num_prompt_tokens:
                continue
            table = table_in(output, request_id, self._table)
            if table is not None:
                prefill.blocks = offered_by_group(self._groups, table)
                found.append(CompletedPrefill(request_id, plain(prefill.blocks), request.num_prompt_tokens))
        return found

    def finished(self, request_id: str, table: BlockTable) -> bool:
        """A request ended with these blocks. Whether its prompt is still in those that were ordered."""
        prefill = self._active.pop(request_id, None)
        if prefill is None or not prefill.blocks:
            return False
        total = prefill.request.num_prompt_tokens
        return all(
            self._same(self._groups[index], now, prefill.blocks[index], total)
            for index, now in offered_by_group(self._groups, table).items()
        )

    @staticmethod
    def _same(group: GroupFacts, now: BlockList, then: BlockList, total: int) -> bool:
        """Whether all blocks before the prompt's end are those of then; a window may have moved on since."""
        if group.kind == "mamba":
            return now.ids.tolist() == then.ids.tolist()
        end = min(now.first + len(now.ids), -(-total // group.block_size))
        if end <= now.first:
            return True
        ours = now.ids[: end - now.first].tolist()
        return (
            now.first >= then.first and ours == then.ids[now.first - then.first : end - then.first].tolist()
        )
