"""What tests and benchmarks ask of an engine of the demo besides answers; the coroutines here run in its host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvctl.demo.deployment import Start
from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec

SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """Counters and gauges of an engine, as of its last step.

    Attributes:
        values: every vLLM counter and gauge by name (`vllm:external_prefix_cache_hits`, ...), summed over labels.
        num_blocks: KV blocks in the cache, the reserved one not counted.
        free_blocks: blocks that no request held at the last step; blocks freed since then are not counted yet.
    """

    values: Mapping[str, float]
    num_blocks: int
    free_blocks: int

    @property
    def external_queries(self) -> int:
        """Tokens that the scheduler asked the connector for."""
        return int(self.values.get("vllm:external_prefix_cache_queries", 0))

    @property
    def external_hits(self) -> int:
        """Tokens that the connector said it would bring."""
        return int(self.values.get("vllm:external_prefix_cache_hits", 0))


@contextlib.contextmanager
def running_engine(spec: EngineSpec, begin: Start = EngineProcess.start) -> Iterator[EngineProcess]:
    """An engine that starts; ended on the way out. After an exception there is no point in waiting long."""
    engine, seconds = begin(spec), 2.0
    try:
        yield engine
        seconds = 20.0
    finally:
        engine.stop(seconds)


def abort(engine: EngineProcess, request_id: str) -> None:
    """Give up a request; its future ends with finish reason `abort`."""
    engine.call(f"{__name__}:_abort", request_id)


def engine_metrics(engine: EngineProcess, timeout: float = SECONDS) -> EngineMetrics:
    """The engine's metrics, as of its last step."""
    return EngineMetrics(**engine.call(f"{__name__}:_metrics").result(timeout))


def reset_prefix_cache(engine: EngineProcess, timeout: float = SECONDS) -> bool:
    """Forget all cached blocks; False (and nothing forgotten) while any block is still held by a request.

    On an idle engine this is also the sharpest test for leaked blocks, since it asks the scheduler itself.
    """
    return cast("bool", engine.call(f"{__name__}:_reset_prefix_cache").result(timeout))


def ask_workers(engine: EngineProcess, method: str, *arguments: Any, timeout: float = SECONDS) -> list[Any]:
    """Call a method of every worker (`worker_extension_cls` adds some); their answers, by rank.

    Raises:
        RuntimeError: a worker raised; the message is vLLM's.
    """
    return cast("list[Any]", engine.call(f"{__name__}:_ask_workers", method, arguments).result(timeout))


async def _abort(engine: Any, request_id: str) -> None:
    await engine.abort(request_id)


async def _reset_prefix_cache(engine: Any) -> Any:
    return await engine.reset_prefix_cache()


async def _ask_workers(engine: Any, method: str, arguments: list[Any]) -> Any:
    return await engine.collective_rpc(method, args=tuple(arguments))


async def _metrics(engine: Any) -> dict[str, Any]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    values: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        value = getattr(metric, "value", None)
        if value is not None:
            values[metric.name] = values.get(metric.name, 0.0) + value
    # vLLM reserves one block and reports the share of the others that is in use.
    blocks = engine.vllm_config.cache_config.num_gpu_blocks - 1
    free = round(blocks * (1.0 - values.get("vllm:kv_cache_usage_perc", 0.0)))
    return {"values": values, "num_blocks": blocks, "free_blocks": free}
