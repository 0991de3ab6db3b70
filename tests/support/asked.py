"""Requests with more to them than a prompt, as a server would give them to its engine."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from kvctl.demo.engine import EngineProcess
from tests.support.pictures import with_picture


@dataclass(frozen=True, slots=True)
class Said:
    """An engine's answer. ``params`` are for the next engine; ``error`` is empty, or why it is not complete."""

    token_ids: tuple[int, ...]
    params: Mapping[str, Any] | None
    error: str


class More(TypedDict, total=False):
    """What may go with a request.

    Attributes:
        adapter: folder of a LoRA adapter.
        regex: what the answer's text has to match.
        rank: the data-parallel rank that is to answer, else vLLM chooses.
        picture: the seed of a picture, which stands behind the prompt's first token.
    """

    adapter: Path
    regex: str
    rank: int | None
    picture: int


def ask(
    engine: EngineProcess,
    prompt: Sequence[int],
    max_tokens: int,
    params: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    **more: Unpack[More],
) -> Future[Any]:
    """Have a prompt answered greedily; `said` reads what the future gives.

    Args:
        engine: who answers.
        prompt: token ids.
        max_tokens: length of the answer.
        params: kv_transfer_params.
        name: the request's id, as both engines get it from a router; one of its own if empty.
        more: what else goes with it.
    """
    command = {
        "id": name or uuid.uuid4().hex,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "params": params,
        "adapter": str(more.get("adapter", "")),
        "regex": more.get("regex", ""),
        "rank": more.get("rank"),
        "picture": more.get("picture", 0),
    }
    return engine.call(f"{__name__}:_answer", command)


def said(answered: Future[Any], timeout: float) -> Said:
    """The answer, once it is there; times are in seconds."""
    token_ids, params, error = answered.result(timeout)
    return Said(tuple(token_ids), params, error)


async def _answer(engine: Any, command: dict[str, Any]) -> tuple[list[int], Any, str]:
    """Runs in the engine's host."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=command["max_tokens"],
        ignore_eos=not command["regex"],
        structured_outputs=StructuredOutputsParams(regex=command["regex"]) if command["regex"] else None,
        extra_args={"kv_transfer_params": command["params"]} if command["params"] else None,
    )
    adapter = command["adapter"]
    lora = LoRARequest(Path(adapter).name, 1, adapter) if adapter else None
    prompt = with_picture(command["prompt"], command["picture"])
    last, error = None, ""
    try:
        async for output in engine.generate(
            prompt,
            sampling,
            command["id"],
            lora_request=lora,
            data_parallel_rank=command["rank"],
        ):
            last = output
    except Exception as raised:  # noqa: BLE001 - any failure of a request is its answer
        error = f"{type(raised).__name__}: {raised}"
    if last is None:
        return [], None, error or "no answer"
    if last.outputs[0].finish_reason == "error":
        error = "the engine ended the request with an error"
    return list(last.outputs[0].token_ids), last.kv_transfer_params, error
