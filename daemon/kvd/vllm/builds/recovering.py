"""A vLLM scheduler that takes failed loads of any model, for the builds whose own does not: 0.26 to 0.29.

Give its path as ``--scheduler-cls`` (`SCHEDULER`). vLLM's own scheduler stays at work; all that is replaced is what
becomes of blocks that did not come. There, block ids are told apart by the one group that a model has; here, by the
request that waits for them. One pool gives all groups of these builds their blocks, and what an asynchronous load fills
belongs to no other request, so any block of a load names it. docs/builds.md says which models need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvd.vllm.builds.probe import SCHEDULER
from kvd.vllm.early import EarlyScheduler
from kvd.vllm.memory.groups import group_facts, keeps_prefix

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from vllm.config import VllmConfig

log = init_logger(f"vllm.{SCHEDULER}")


def recovering_scheduler(*, vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """The scheduler of an engine, asynchronous where it is configured to be."""
    made = _RecoveringAsync if vllm_config.scheduler_config.async_scheduling else _Recovering
    return made(vllm_config=vllm_config, **arguments)


class _Recovering(Scheduler):
    def _handle_invalid_blocks(
        self, invalid_block_ids: AbstractSet[int], num_scheduled_tokens: Mapping[str, int], *more: Any
    ) -> set[str]:
        """Requests that fail for a load that did, as vLLM's method gives them: those of policy ``fail``.

        With policy ``recompute`` nothing of the load is kept: the request is computed anew once all workers are done.
        """
        if keeps_prefix(group_facts(self.kv_cache_config)):
            return super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens, *more)
        failed = {
            request.request_id
            for request in self.requests.values()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and not invalid_block_ids.isdisjoint(self._blocks_of(request.request_id))
        }
        for request_id in failed:
            self.requests[request_id].num_computed_tokens = 0
        if not self.recompute_kv_load_failures:
            log.error("The KV of %d request(s) did not come, and the policy is fail: %s", len(failed), failed)
            return failed
        log.warning("The KV of %d request(s) did not come, they are computed here: %s", len(failed), failed)
        self.failed_recving_kv_req_ids |= failed
        return set()

    def _blocks_of(self, request_id: str) -> set[int]:
        return {block for group in self.kv_cache_manager.get_block_ids(request_id) for block in group}


class _RecoveringAsync(_Recovering, EarlyScheduler):
    pass
