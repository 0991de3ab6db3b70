"""Runs in an engine's host, called by `EngineProcess.call`: one request, and when everything about it happened."""

from __future__ import annotations

import time
from typing import Any

SERVE = f"{__name__}:serve"
FACTS = f"{__name__}:facts"


async def serve(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to ``request`` with its times, all of them time.monotonic(), which is one clock on a host.

    ``got``: the request was here. ``queued``, ``scheduled``, ``first``: vLLM's core had it, began its first step, had
    the first new token. ``tokens``: when each was here, and how many came at once.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = request["kv_transfer_params"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if params is None else {"kv_transfer_params": params},
    )
    got = time.monotonic()
    prompt = {"prompt_token_ids": request["prompt_token_ids"]}
    tokens: list[tuple[float, int]] = []
    last: Any = None
    async for output in engine.generate(prompt, sampling, request["id"]):
        last = output
        if count := len(output.outputs[0].token_ids):
            tokens.append((time.monotonic(), count))
    if last.outputs[0].finish_reason == "error":
        raise RuntimeError("the engine ended the request with an error")
    stats = last.metrics
    return {
        "got": got,
        "queued": stats.queued_ts,
        "scheduled": stats.scheduled_ts,
        "first": stats.first_token_ts,
        "tokens": tokens,
        "kv_transfer_params": last.kv_transfer_params,
        "cached": last.num_cached_tokens,
    }


async def facts(engine: Any) -> dict[str, Any]:
    """What this engine runs as: whether scheduling is asynchronous, and which CUDA graphs there are."""
    config = engine.vllm_config
    return {
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "compilation_mode": str(config.compilation_config.mode),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
    }
