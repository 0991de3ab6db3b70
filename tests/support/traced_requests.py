"""Requests that belong to a trace, asked of an engine of the demo as vLLM's server asks them; runs in its host too."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvctl.demo.engine import EngineProcess

_NUMBERS = itertools.count(1)


def ask_traced(
    engine: EngineProcess,
    prompt: Sequence[int],
    tokens: int,
    params: Mapping[str, Any] | None = None,
    traceparent: str = "",
) -> Future[Any]:
    """The answer's tokens and params, of a request that came with that header."""
    headers = {"traceparent": traceparent} if traceparent else None
    name = f"traced-{next(_NUMBERS)}"
    return engine.call(f"{__name__}:_asked", name, list(prompt), tokens, params and dict(params), headers)


async def _asked(
    engine: Any,
    name: str,
    prompt: list[int],
    tokens: int,
    params: dict[str, Any] | None,
    headers: dict[str, str] | None,
) -> dict[str, Any]:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
    last: Any = None
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name, trace_headers=headers):
        last = output
    return {"token_ids": list(last.outputs[0].token_ids), "params": last.kv_transfer_params}
