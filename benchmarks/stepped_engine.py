"""An engine without a model, stepped by hand: vLLM's scheduler and a worker's connector. For benchmarks/step_cost.py.

Steps go as in vLLM's engine core with asynchronous scheduling and one worker in the scheduler's process: a step is
scheduled and launched before the results of the one before are taken. What a model would launch is a number of small
torch operations, each of which gives Python's lock away for an instant, as launches on a GPU do.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvd.vllm.metadata import StepMetadata
from tests.support.rigs.stepped import SteppedScheduler, attention

AHEAD = 2
"""Steps that are under way at most."""

Around = Callable[[str], contextlib.AbstractContextManager[None]]
"""Given the name of a part of a step, what it runs within."""


def _alone(_: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class SteppedEngine:
    """One engine. ``launches`` are the operations of a step that computes; ``around`` sees a step's parts."""

    def __init__(
        self,
        model: Path,
        connector: dict[str, Any],
        *,
        block: int,
        pool: int,
        longest: int,
        launches: int,
        around: Around = _alone,
    ) -> None:
        self._bench = SteppedScheduler(
            model,
            connector,
            block=block,
            pool=pool,
            longest=longest,
            chunk=longest,
            ahead=True,
            choose=_early,
        )
        self.scheduler = self._bench.scheduler
        self.worker, self._pages = _worker(self._bench.config, self._bench.caches, block)
        self._launches, self.around = launches, around
        self.left = 0
        """Loads that had not begun when their step did."""
        self._numbers = torch.zeros(1)
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def arrive(self, name: str, tokens: list[int], params: dict[str, Any] | None, count: int) -> None:
        """A request for so many tokens."""
        self._bench.arrive(name, tokens, params, max_tokens=count)

    def step(self) -> list[Any]:
        """A turn of the engine core: schedule and launch a step, then take what came of the oldest; its answers."""
        if self.scheduler.has_requests():
            with self.around("schedule"):
                output = self.scheduler.schedule()
            self._under_way.append((output, self._execute(output)))
            if len(self._under_way) < AHEAD and (
                output.num_scheduled_tokens or self.scheduler.has_requests()
            ):
                return []
        if not self._under_way:
            return []
        with self.around("update"):
            answers = self.scheduler.update_from_output(*self._under_way.popleft())
        return [one for client in answers.values() for one in client.outputs]

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """As `vllm.v1.worker.gpu.kv_connector` and the runner have it."""
        names = list(output.num_scheduled_tokens)
        if isinstance(output.kv_connector_metadata, StepMetadata):
            self.left += len(output.kv_connector_metadata.orders.loads)
        with self.around("worker, before"):
            self.worker.handle_preemptions(output.kv_connector_metadata)
            self.worker.bind_connector_metadata(output.kv_connector_metadata)
        if names:
            with self.around("launch"):
                for _ in range(self._launches):
                    self._numbers.add_(1)
        with self.around("worker, after"):
            told = self._told(output)
        chunks = [self.scheduler.requests[name].is_prefill_chunk for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[] if chunk else [7] for chunk in chunks],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=told,
        )

    def _told(self, output: Any) -> KVConnectorOutput:
        worker, told = self.worker, KVConnectorOutput()
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told.finished_sending = results.finished_sending or None
        told.finished_recving = results.finished_recving or None
        told.failed_recving = results.failed_recving
        told.invalid_block_ids = worker.get_block_ids_with_load_errors()
        told.kv_connector_stats = worker.get_kv_connector_stats()
        told.kv_cache_events = worker.get_kv_connector_kv_cache_events()
        told.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return told

    def number_blocks(self) -> None:
        """Have every block hold its number, wherever a load looks."""
        self._pages[:] = torch.arange(1, len(self._pages) + 1, dtype=torch.int32)[:, None]

    def wrong_blocks(self, name: str, theirs: list[int]) -> int:
        """How many of a request's first blocks do not hold what `number_blocks` gave to these blocks of a peer."""
        (mine,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        held = self._pages[mine[: len(theirs)]]
        return int((held != torch.tensor(theirs, dtype=torch.int32)[:, None] + 1).any(dim=1).sum())

    def waits(self, name: str) -> bool:
        """Whether a request waits for its KV."""
        request = self.scheduler.requests.get(name)
        return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def rest(self, seconds: float) -> None:
        """Take no step for a while; other threads have the time."""
        time.sleep(seconds)

    def close(self) -> None:
        """End both halves."""
        self.worker.shutdown()
        self.scheduler.shutdown()


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """VLLM's process groups of one process, which a worker's connector asks for its place."""
    from vllm.config import VllmConfig

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{folder}/group",
        )
        ensure_model_parallel_initialized(1, 1)
    yield


def _early(config: Any) -> None:
    """As a worker does that is made before its scheduler."""
    from kvd.vllm.early import schedule_early

    schedule_early(config)


def _worker(config: Any, caches: Any, block: int) -> tuple[Any, torch.Tensor]:
    """A worker's connector with registered memory of one layer, and that memory, a row for each block."""
    spec, name = attention(block), caches.kv_cache_groups[0].layer_names[0]
    page, layout = spec.page_size_bytes, KVCacheLayout.LBHNC
    with set_current_vllm_config(config):
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        with worker.get_mem_pool_context() or contextlib.nullcontext():
            raw = torch.zeros(max(page * caches.num_blocks, 2 << 20), dtype=torch.int8)
        placed = KVCacheTensor(
            size=raw.numel(), layers=[name], layer_stride=page * caches.num_blocks, block_stride=page
        )
        caches.kv_cache_tensors = [placed]
        views = create_kv_cache_views(raw, spec, caches.num_blocks, layout, placed)
        worker.register_kv_caches({name: views[0]})
    return worker, raw[: page * caches.num_blocks].view(torch.int32).view(caches.num_blocks, -1)
