"""KvdConnector: vLLM's connector interface, each call passed on to the half that it belongs to."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvd.backends.registry import open_backend
from kvd.client.session import KvdSession
from kvd.shown import logger
from kvd.vllm.builds.versions import (
    brings_states,
    check_prefill_context,
    check_sleep,
    engine_facts,
    hit_source,
    is_copy,
    joins_layers,
    load_failure_policy,
    log_beside_vllm,
    lookahead,
    one_engine,
    place,
    required_layout,
    safe_loads,
    several_hosts,
    transfer_results,
)
from kvd.vllm.early import only_worker, present, schedule_early
from kvd.vllm.memory.caches import by_layer, in_one_form
from kvd.vllm.memory.groups import cached_blocks, group_facts
from kvd.vllm.memory.page_sums import summer_of
from kvd.vllm.memory.pool import kv_memory
from kvd.vllm.memory.streams import event_recorder, stream_handle
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.vllm.metadata import StepMetadata, WorkerMetadata
from kvd.vllm.metrics import KvdPromMetrics, KvdTransferStats, transfer_stats
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.vllm.scheduler.in_step import InStep
from kvd.vllm.scheduler.rehearsal import try_rehearsal
from kvd.vllm.stock import connector_settings
from kvd.worker.orders import StepOutcomes
from kvd.worker.push.prefiller import Pushing
from kvd.worker.reporting import Results
from kvd.worker.step_loads import IDLE_WAIT
from kvd.worker.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logger(__name__)

_COMPLETED = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED})


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between engines with kvd as the control plane.

    See docs/connector.md for what goes into its configuration.
    """

    _cache_hit_source = hit_source()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The order of dimensions that gives the longest runs, between workers of different heads too."""
        return required_layout(vllm_config, connector_settings(vllm_config)[0])

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Asked by vLLM 0.26 to 0.28: whether all layers of a block are to stand side by side."""
        return joins_layers(self._settings)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether full attention may hit deeper than other groups here: each load brings what these lack."""
        return self._brings_states

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_beside_vllm()
        check_sleep(vllm_config)
        check_prefill_context(vllm_config)
        if role == KVConnectorRole.WORKER:
            schedule_early(vllm_config)
        settings, of_stock = connector_settings(vllm_config)
        self._settings = several_hosts(vllm_config, settings)
        if of_stock and role == KVConnectorRole.SCHEDULER:
            log.warning("%s", of_stock)
        self._groups = group_facts(kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size)
        layers = sum(len(g.layer_names) for g in kv_cache_config.kv_cache_groups)
        self._safe = safe_loads(vllm_config, self._groups)
        self._brings_states = brings_states(self._groups, self._safe)
        ahead = lookahead(vllm_config, kv_cache_config)
        self._engine = engine_facts(vllm_config, self._groups, self._settings, layers, self._safe, ahead)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._owed = Results(), StepOutcomes()
        self._bad_blocks: set[int] = set()
        self._copy = self._idle = False
        self._unread: set[str] = set()
        self._pushing: Pushing | None = None
        self._device = vllm_config.device_config.device_type
        # With microbatches the hook is called when half of the step's tokens are there.
        self._layerwise = not getattr(vllm_config.parallel_config, "use_ubatching", False)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                self._settings,
                self._engine,
                self._groups,
                load_failure_policy(vllm_config),
                self._opens_session(f"kvd-scheduler-{self._engine.engine_id[:8]}"),
            )
            if self._engine.role != "prefill":
                try_rehearsal(self._settings, self._groups)

    # --- the worker's half ---

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """Where the KV memory is to be allocated: on CPUs, where the backend has use for it, as memory to be mapped."""
        return kv_memory(self._settings.backend, self._settings.backend_options, self._device)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the KV memory, register it with the backend, present this worker to kvd."""
        if not self._kv_caches:  # not again after a sleep
            self._engine = one_engine(self._vllm_config, self._engine)
        self._kv_caches = kv_caches
        self._copy = is_copy(self._vllm_config)
        if self._copy:
            return
        kv_caches = in_one_form(kv_caches, torch.int8)
        where = place(self._vllm_config)
        geometry = worker_geometry(kv_caches, self._kv_cache_config, self._groups, where)
        half = WorkerHalf(
            self._settings,
            self._engine,
            geometry,
            sibling_geometries(kv_caches, self._kv_cache_config, self._groups, where),
            open_backend(
                self._settings.backend,
                f"{self._engine.engine_id}-{geometry.rank}",
                self._settings.backend_options,
            ),
            self._opens_session(f"kvd-worker-{geometry.rank}"),
            event_recorder(self._device),
            summer_of,
            memory=kv_caches,
            stream_of=stream_handle(self._device),
        )
        half.inherit(*self._owed)
        self._worker = half
        present(self._engine, half)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003 - vLLM's
        """Asked by vLLM 0.33 and later. A backend that cannot have such memory says so when it is registered."""
        return True

    def unregister_kv_caches(self) -> None:
        """The KV memory is about to be unmapped: this worker leaves as if its process ended. Peers hear of it first."""
        if self._worker is not None:
            self._owed = self._worker.retire()
            self._worker = None

    def restore_kv_caches(self) -> None:
        """It is mapped again, with nothing in it: a new worker, and so a new generation of this engine."""
        if self._worker is None and self._kv_caches:
            self.register_kv_caches(self._kv_caches)

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]
    ) -> None:
        """The same for memory in which all layers of a block stand side by side."""
        self.register_kv_caches(by_layer(kv_cache, attn_backend, self._kv_cache_config.kv_cache_tensors))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step is about to begin: note what it computes of pushed requests, before it overwrites any block."""
        if self._worker is None or not isinstance(kv_connector_metadata, StepMetadata):
            return
        pushing = self._worker.pushing
        self._pushing = pushing if pushing.begin(kv_connector_metadata.orders) else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step's orders. What vLLM zeroes before a step is queued by now, and nothing yet of the forward."""
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, StepMetadata):
            return
        orders = connector_metadata.orders
        if self._worker is not None:
            self._worker.bound(orders)
        elif self._copy:
            # vLLM frees blocks once every worker has said so. Nobody reads this one's.
            self._unread.update(orders.freed, (end.request_id for end in orders.push_ends if not end.cause))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin the loads of this step; returns at once."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._worker.start(metadata.orders)
            self._idle = metadata.orders.idle
            if self._idle:
                self.wait_for_save()  # builds before 0.30 do not call it in a step that computes nothing

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are complete before a request is scheduled."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002 - vLLM's signature
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """A layer of this step is computed: what is pushed of it may be sent."""
        if self._pushing is not None and self._layerwise:
            self._pushing.saved(layer_name)

    def wait_for_save(self) -> None:
        """The step is over, also for layers without a hook.

        Nothing is waited for, since blocks stay until they are sent; but for a staged engine's copy of a whole prompt.
        """
        if self._worker is not None:
            self._worker.stepped()
        if self._pushing is not None:
            self._pushing.stepped()
            self._pushing = None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """What ended since the last step, through the channel that fits the number of groups."""
        return transfer_results(*self._ended())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:  # noqa: ARG002
        """The same for builds before 0.30, which hear of bad blocks only."""
        sent, received, _ = self._ended()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, where vLLM can keep what comes before them."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Why loads failed, for the scheduler's half."""
        outcomes = self._worker.outcomes() if self._worker is not None else None
        return WorkerMetadata(outcomes) if outcomes is not None else None

    # --- metrics, of both halves ---

    def get_kv_connector_stats(self) -> KvdTransferStats | None:
        """What became of transfers since the last step, as far as this half knows."""
        half = self._worker or self._scheduler
        return transfer_stats(half.tally) if half is not None and half.tally.any else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdTransferStats:
        """The same out of what crossed to the process that logs it."""
        return KvdTransferStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdPromMetrics:
        """`vllm:kvd_*`, beside vLLM's own metrics."""
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End both halves."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # --- the scheduler's half ---

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The blocks are there, of which vLLM takes back what its requests had."""
        self._half.freed_blocks.watch(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """The cache is there, which peers may read prefixes from."""
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)
        self._half.prefixes.bind(kv_cache_manager, self._vllm_config.parallel_config.data_parallel_size)

    def on_new_request(self, request: Request) -> None:
        """Ask early for whatever the request will need."""
        self._half.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded from the remote prefiller."""
        return self._half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has blocks: order the load for its claim."""
        cached = cached_blocks(blocks) if self._brings_states else ()
        self._half.allocated(request, blocks.get_block_ids(), num_external_tokens, cached)
        self._half.holds(request.request_id, blocks.get_block_ids)
        self._half.prefixes.allocated(request, blocks.blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's orders for the workers."""
        return StepMetadata(self._half.step_orders(scheduler_output))

    def has_pending_push_work(self) -> bool:
        """Whether a pushed request's blocks are held: only a step can learn that they were sent."""
        return self._half.holds_pushed

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Loads ended on all workers."""
        if sent := connector_output.finished_sending:
            self._half.sent(set(sent))
        told, received = connector_output.kv_connector_worker_meta, connector_output.finished_recving
        outcomes = told.outcomes if isinstance(told, WorkerMetadata) else None
        if received or outcomes:
            self._half.loads_ended(set(received or ()), outcomes)

    @property
    def at_hand(self) -> tuple[WorkerHalf, InStep] | None:
        """This engine's only worker, where it is in this process, and the loads that their own steps use."""
        worker = only_worker(self._engine.engine_id)
        return (worker, self._half.in_step) if worker is not None else None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request of a model with one group ended."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: keep its blocks for a decoder where it asked for that."""
        return self._half.finished(request, block_ids, completed=request.status in _COMPLETED)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002
        """Every group: vLLM is not to zero the blocks of a load while it writes them.

        What the load does not write of them the worker zeroes itself, on every build (`kvd.topology.leftover`).
        """
        return tuple(range(len(self._groups)))

    def _ended(self) -> tuple[set[str], set[str], set[str]]:
        """Requests that were sent, received, and those of the received that failed as a whole.

        Where a prefix can be kept vLLM takes the blocks that failed, else the whole request; where its scheduler is
        ours, any blocks of the request (`kvd.vllm.builds.recovering`).
        """
        if self._worker is None:
            unread, self._unread = self._unread, set()
            return unread, set(), set()
        results = self._worker.results(IDLE_WAIT if self._idle else 0.0)
        by_block = {"blocks": results.bad_blocks, "scheduler": results.lost_blocks}
        if self._safe.channel not in by_block:
            return results.sent, results.received, results.failed
        self._bad_blocks |= by_block[self._safe.channel]
        return results.sent, results.received, set()

    def _opens_session(self, name: str) -> functools.partial[KvdSession]:
        return functools.partial(KvdSession, directory=self._settings.runtime_dir, name=name)

    @property
    def _half(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("vLLM called a scheduler method on a worker's connector")
        return self._scheduler


# In the process that logs, a MultiConnector looks up by name whose statistics it was given. It imported us before that.
with contextlib.suppress(ValueError):  # somebody has the name registered
    KVConnectorFactory.register_connector("KvdConnector", "kvd.vllm", "KvdConnector")
