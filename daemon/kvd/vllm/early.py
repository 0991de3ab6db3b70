"""A load begins as its step is scheduled and is used in the very next step, where vLLM schedules ahead of results.

With asynchronous scheduling vLLM's scheduler hears of a step only after it has scheduled the next one. So it uses a
load two steps after the step in which its worker reports it. Where the engine's only worker runs in the scheduler's own
process, as vLLM has it with one GPU, the scheduler here asks that worker before each step while loads are under way.
It also hands it a step's loads at once: with the step itself they come after its inputs are prepared.

An engine without other work would make a step that computes nothing for the sake of those loads, which takes longer
than most of them. The scheduler waits for a load that is due soon, and schedules the step that uses it instead. One
with other work puts a step off for a load that is due within a fraction of a millisecond.

Of loads that end between steps only complete ones go this way: a miss is reported with its step, as vLLM's recovery
expects it. A short load may be used in the step that orders it (`kvd.vllm.scheduler.in_step`). Whether it stands is
asked before that step's results are taken, and of a miss the request is taken back.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Collection, Container, Mapping, Sized
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput

from kvd.shown import logger
from kvd.vllm.metadata import StepMetadata, WorkerMetadata
from kvd.vllm.taking_back import can_take_back, take_back
from kvd.vllm.vllm_types import changes_blocks, changes_some
from kvd.worker.step_loads import IDLE_WAIT, POSTING_WAIT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvd.wire.identity import EngineFacts
    from kvd.worker.orders import ClaimAnswer, StepOutcomes
    from kvd.worker.worker import WorkerHalf

log = logger(__name__)

_TAKE = "_update_from_kv_xfer_finished"
"""vLLM's method that takes what workers report of transfers; not public, so it is looked for."""

_CARRIED = frozenset({"finished_req_ids", "kv_connector_metadata"})
"""What a step that computes nothing may have to tell the worker, and the one after it can in its place."""
_SAID_OF_NOTHING = frozenset(
    {"scheduled_cached_reqs", "num_common_prefix_blocks", "num_spec_tokens_to_schedule"}
)
"""What a step says of its requests though it has none. Whatever else it says, it is not left out."""

LET_GO_SECONDS = 20e-6
"""How long the step after one that used loads is put off: 0.1 ms, with what the kernel adds. The thread that sends
their first tokens needs Python's lock for that, and would get it in the middle of the next step, 0.4 ms later."""

_only_workers: weakref.WeakValueDictionary[str, WorkerHalf] = weakref.WeakValueDictionary()
"""The workers of this process that are all of their engines, by engine id."""


class UsedInStep(Protocol):
    """The loads that their own steps use (`kvd.vllm.scheduler.in_step.InStep`)."""

    @property
    def unsettled(self) -> Sized:
        """Those of steps whose results were not taken."""

    @property
    def settled(self) -> Sized:
        """Those of which it is known what became of them since the last step was scheduled."""

    def answers(self) -> list[ClaimAnswer]:
        """How claims were answered beside which loads run, as far as no worker was told."""

    def at_hand(self, loads: Any, *, busy: bool, under_way: int) -> None:
        """A step is about to be scheduled, by who can take requests back.

        ``busy``: others compute in it. So many before it are ``under_way``.
        """

    def missed(self, scheduled: Container[str]) -> Mapping[str, Collection[int]]:
        """Of a step's requests those whose loads are misses, or that are gone, with the blocks of each."""

    def tell(self) -> None:
        """Tell what became of loads; nobody waits for that."""


class EarlyScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, at one with the engine's only worker.

    That begins loads as soon as they are ordered, and tells of complete ones before the next step.
    """

    _idle = False
    """Whether the last step computed nothing, and no request came since."""
    _under_way = 0
    """Steps of which it was not told what came of them."""
    _in_step: UsedInStep | None = None
    """The loads that their own steps use; None where a request cannot be taken back."""
    _looked = False

    def schedule(self, *arguments: Any, **named: Any) -> SchedulerOutput:
        """Schedule a step, with the loads that are complete by now or nearly.

        Where there is nothing else to do, with those that are complete soon.
        """
        at_hand = getattr(self.connector, "at_hand", None)
        if at_hand is None:
            output = super().schedule(*arguments, **named)
        else:
            worker: WorkerHalf = at_hand[0]
            if at_hand[1].settled:
                time.sleep(LET_GO_SECONDS)
            if worker.expects:
                self._take(self._complete(*at_hand))
            self._use_in_step(*at_hand)
            output = super().schedule(*arguments, **named)
            idle = not output.total_num_scheduled_tokens and not self._lockstep
            begun = begin_if_untouched(worker, output, POSTING_WAIT if idle else 0.0)
            if begun and idle and self._used_soon(worker, output):
                output = in_place_of(output, super().schedule(*arguments, **named))
                begin_if_untouched(worker, output, 0.0)
        self._idle = not output.total_num_scheduled_tokens
        self._under_way += 1
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *arguments: Any, **named: Any) -> Any:
        """Take the results of a step, once it is known whether the loads that it used stand."""
        self._under_way -= 1
        used = self._in_step
        if used is None or not used.unsettled:
            return super().update_from_output(scheduler_output, *arguments, **named)
        for request_id, blocks in used.missed(scheduler_output.num_scheduled_tokens).items():
            if take_back(self, request_id, blocks):
                log.warning(
                    "the load of request %s, which its step has used, is a miss: it begins anew", request_id
                )
        given = super().update_from_output(scheduler_output, *arguments, **named)
        if not self.has_requests():  # else the next step is as good, and the answer goes out first
            used.tell()
        return given

    def add_request(self, request: Request) -> None:
        """A request came."""
        self._idle = False
        super().add_request(request)

    def _use_in_step(self, worker: WorkerHalf, loads: UsedInStep) -> None:
        """Loads of the coming step may be used in it."""
        if not self._looked:
            self._looked = True
            self._in_step = loads if can_take_back(self) else None
        if self._in_step is not None:
            self._in_step.at_hand(worker.in_step, busy=bool(self.running), under_way=self._under_way)

    @property
    def _lockstep(self) -> bool:
        """Whether other engines wait for each step of this one, as with data parallelism."""
        return bool(self.vllm_config.parallel_config.data_parallel_size > 1)

    def _used_soon(self, worker: WorkerHalf, output: SchedulerOutput) -> bool:
        """Whether a load is complete before an empty step would be over, and the step can be left out."""
        # What was reported with a step that is under way would wait as long.
        if self._under_way or not may_be_left_out(output):
            return False
        return self._take(worker.complete_soon(idle=True))

    def _complete(self, worker: WorkerHalf, loads: UsedInStep) -> tuple[set[str], StepOutcomes]:
        worker.loads.answered(loads.answers())
        if self._lockstep:
            return worker.complete()
        return worker.complete(IDLE_WAIT) if self._idle else worker.complete_soon(idle=False)

    def _take(self, complete: tuple[set[str], StepOutcomes]) -> bool:
        received, outcomes = complete
        if received:
            told = WorkerMetadata(outcomes)
            getattr(self, _TAKE)(KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=told))
        return bool(received)


def begin_if_untouched(worker: WorkerHalf, output: SchedulerOutput, wait: float) -> bool:
    """Have a worker do what a step says of loads before the step begins; whether a load begins.

    Not where the step does something to blocks beforehand. It may zero blocks or copy them, and notes what of pushed
    requests is still in blocks that a load was given now.
    """
    metadata = output.kv_connector_metadata
    if not isinstance(metadata, StepMetadata):
        return False
    orders = metadata.orders
    if (
        not (orders.loads or orders.answered or orders.dropped)
        or orders.pushes
        or orders.push_ends
        or (changes_some(output) and any(changes_blocks(output, order.block_ids) for order in orders.loads))
    ):
        return False
    return worker.begin_ahead(orders, wait)


def may_be_left_out(output: SchedulerOutput) -> bool:
    """Whether a step computes nothing, and whatever else it has to do the next one can (`in_place_of`)."""
    metadata = output.kv_connector_metadata
    if output.total_num_scheduled_tokens or not isinstance(metadata, StepMetadata):
        return False
    told = [field.name for field in dataclasses.fields(output) if getattr(output, field.name)]
    return metadata.orders.may_wait and _CARRIED.union(_SAID_OF_NOTHING).issuperset(told)


def in_place_of(left_out: SchedulerOutput, following: SchedulerOutput) -> SchedulerOutput:
    """The ``following`` step, which from now on also does all that the one before had to do."""
    following.finished_req_ids = left_out.finished_req_ids | following.finished_req_ids
    before, after = left_out.kv_connector_metadata, following.kv_connector_metadata
    if isinstance(before, StepMetadata) and isinstance(after, StepMetadata):
        after.orders.take_over(before.orders)
    return following


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
