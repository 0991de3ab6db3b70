"""What the scheduler's half uses of vLLM's request, and the one change that it makes to it."""

from __future__ import annotations

from typing import Any, Protocol


class Request(Protocol):
    """What is used of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    _all_token_ids: list[int]


def wants_prompt_logprobs(request: Request) -> bool:
    """Whether log probabilities of the prompt are asked for: who answers computes it, whatever was loaded."""
    sampling = getattr(request, "sampling_params", None)
    return sampling is not None and sampling.prompt_logprobs is not None


def drop_last_token(request: Request) -> None:
    """The prefiller of a model with state stops one token short of the prompt's end.

    A state fits one position. The decoder has to compute the prompt's last token itself to get its first
    output, so the state it is handed must be the one before that token.
    """
    params = request.kv_transfer_params
    if (
        params is None
        or params.get("kvd_short")
        or request.num_prompt_tokens < 2
        or request.prompt_token_ids is None
    ):
        return
    del request.prompt_token_ids[-1]
    del request._all_token_ids[-1]  # noqa: SLF001 - vLLM keeps the token list in two places
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    params["kvd_short"] = True
