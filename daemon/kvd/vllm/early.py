"""A load that is complete is used in the very next step, where vLLM schedules steps ahead of their results.

With asynchronous scheduling vLLM's scheduler hears of a step only after it has scheduled the next one. So it uses a
load two steps after the step in which its worker reports it. Where the engine's only worker runs in the scheduler's own
process, as vLLM has it with one GPU, the scheduler here asks that worker before each step.

Only complete loads go this way. A miss is reported with its step, as vLLM's recovery expects it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvd.shown import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvd.wire.identity import EngineFacts
    from kvd.worker.worker import WorkerHalf

log = logger(__name__)

_TAKE = "_update_from_kv_xfer_finished"
"""vLLM's method that takes what workers report of transfers; not public, so it is looked for."""

_only_workers: weakref.WeakValueDictionary[str, WorkerHalf] = weakref.WeakValueDictionary()
"""The workers of this process that are all of their engines, by engine id."""


class EarlyScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, told of complete loads before each step instead of after the next one."""

    def schedule(self, *arguments: Any, **named: Any) -> SchedulerOutput:
        """Schedule a step, with the loads that are complete by now."""
        complete = getattr(self.connector, "complete_loads", None)
        told = complete() if complete is not None else None
        if told is not None:
            getattr(self, _TAKE)(told)
        return super().schedule(*arguments, **named)


def schedule_early(vllm_config: VllmConfig) -> None:
    """Have this engine scheduled by `EarlyScheduler`, where that is of use and nobody has chosen another scheduler.

    To be called by the worker, of which vLLM makes its scheduler later. Where they are two processes each has a
    configuration of its own, and this changes nothing.
    """
    scheduling, transfer = vllm_config.scheduler_config, vllm_config.kv_transfer_config
    if (
        scheduling.async_scheduling
        and scheduling.scheduler_cls is None
        and vllm_config.parallel_config.world_size == 1
        and transfer is not None
        and transfer.kv_role != "kv_producer"
        and transfer.kv_connector == "KvdConnector"
        and hasattr(AsyncScheduler, _TAKE)
    ):
        scheduling.scheduler_cls = EarlyScheduler
        log.info("complete loads are used in the next step: vLLM's asynchronous scheduler, as %s", __name__)


def present(engine: EngineFacts, worker: WorkerHalf) -> None:
    """A worker of this process; kept in mind where it is the only one of its engine."""
    if engine.world_size == 1:
        _only_workers[engine.engine_id] = worker


def only_worker(engine_id: str) -> WorkerHalf | None:
    """The only worker of that engine, if it is in this process."""
    return _only_workers.get(engine_id)
