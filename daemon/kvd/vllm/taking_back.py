"""Taking a request out of steps that are under way: it begins anew, and what they compute of it is thrown away.

vLLM does so itself where its prefix cache is reset under running requests. Its means for that have no public name, so
they are looked for, and what the builds have differs.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request

_DROPS = "drop_stale_output"
_COUNTS = "async_tokens_to_discard"
_PREEMPT = getattr(AsyncScheduler, "_preempt_request", None)
_TAKES_DROPS = _PREEMPT is not None and _DROPS in inspect.signature(_PREEMPT).parameters
_UPDATE = getattr(AsyncScheduler, "_update_request_with_output", None)
_TAKES_COUNTS = _UPDATE is not None and _COUNTS in getattr(_UPDATE, "__code__").co_names  # noqa: B009 - of any callable


def can_take_back(scheduler: Any) -> bool:
    """Whether `take_back` works on a scheduler of this build, for its model and settings.

    Drafters look at tokens that would be thrown away. States that are kept for prefixes are copied before a step is put
    behind a load.
    """
    config = scheduler.vllm_config
    return (
        _PREEMPT is not None
        and (_TAKES_DROPS or _TAKES_COUNTS)
        and hasattr(scheduler.kv_cache_manager, "evict_blocks")
        and isinstance(getattr(scheduler, "prev_step_scheduled_req_ids", None), set)
        and config.speculative_config is None
        and config.parallel_config.data_parallel_size == 1
        and getattr(config.cache_config, "mamba_cache_mode", "none") == "none"
    )


def take_back(scheduler: Any, request_id: str, blocks: Collection[int]) -> bool:
    """Have a request begin anew, as one that is preempted, though steps with it are under way; False if it has ended.

    Nothing that is found in ``blocks`` by its hash is found any more, nor in those that the request has now.
    """
    request: Request | None = scheduler.requests.get(request_id)
    if request is None or request.is_finished():
        scheduler.kv_cache_manager.evict_blocks(set(blocks))
        return False
    now = scheduler.kv_cache_manager.get_block_ids(request_id)
    scheduler.kv_cache_manager.evict_blocks({*blocks, *itertools.chain.from_iterable(now)})
    more = {_DROPS: True} if _TAKES_DROPS else {}
    if request.status == RequestStatus.RUNNING:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), **more)  # noqa: SLF001 - looked for above
        # It may be scheduled again at once: to the workers it is one that was away.
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
    elif _TAKES_DROPS:  # vLLM has preempted it meanwhile
        setattr(request, _DROPS, True)
    if not _TAKES_DROPS:
        # vLLM may be throwing some away already.
        setattr(request, _COUNTS, getattr(request, _COUNTS) + request.num_output_placeholders)
        request.num_output_placeholders = 0
    if (stats := getattr(request, "prefill_stats", None)) is not None:
        told = dict.fromkeys(("num_local_cached_tokens", "num_external_cached_tokens"), 0)
        stats.set(num_prompt_tokens=request.num_prompt_tokens, **told)
    return True
