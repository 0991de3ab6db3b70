"""What the scheduler's half uses of vLLM's request and step, and the changes that it makes to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from kvd.wire.limits import Facts

LOOKAHEAD = "prefill_lookahead"
"""The fact of an engine that `lookahead_of` reads."""
_ZEROED, _COPIES = "new_block_ids_to_zero", "kv_cache_block_copies"
"""What vLLM's SchedulerOutput says of blocks that a step changes before it computes."""
BlockTable = Sequence[Sequence[int]]
"""A request's block ids by group."""


class VllmRequest(Protocol):
    """What is used of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    _all_token_ids: list[int]


class BlockState(Protocol):
    """What is used of vLLM's KVConnectorBlockState."""

    def get_block_ids(self, req_id: str) -> BlockTable | None:
        """The block table of a request that is scheduled in this step."""


class VllmStep(Protocol):
    """What is used of vLLM's SchedulerOutput."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens that the step computes, by request."""

    @property
    def preempted_req_ids(self) -> AbstractSet[str] | None:
        """Requests that lost their blocks since the last step."""

    @property
    def kv_connector_block_state(self) -> BlockState | None:
        """The block tables."""


def table_in(
    output: VllmStep, request_id: str, table: Callable[[str], BlockTable | None]
) -> BlockTable | None:
    """The block table of a request that a step computes; from ``table`` where the step's output has none."""
    state = getattr(output, "kv_connector_block_state", None)  # builds before 0.29 have none
    return (state.get_block_ids(request_id) if state is not None else None) or table(request_id)


def changes_blocks(output: object, blocks: AbstractSet[int]) -> bool:
    """Whether a step may zero or copy any of these blocks before it computes. Of copies all may be meant."""
    return bool(getattr(output, _COPIES, None)) or not blocks.isdisjoint(getattr(output, _ZEROED, None) or ())


def changes_some(output: object) -> bool:
    """Whether a step may zero or copy any block before it computes."""
    return bool(getattr(output, _COPIES, None) or getattr(output, _ZEROED, None))


def leave_unzeroed(output: object, blocks: AbstractSet[int]) -> None:
    """Have a step not zero these blocks, which a load fills that it uses; those of other loads vLLM leaves out."""
    if zeroed := getattr(output, _ZEROED, None):
        setattr(output, _ZEROED, [block for block in zeroed if block not in blocks] or None)


def wants_prompt_logprobs(request: VllmRequest) -> bool:
    """Whether log probabilities of the prompt are asked for: who answers computes it, whatever was loaded."""
    sampling = getattr(request, "sampling_params", None)
    return sampling is not None and sampling.prompt_logprobs is not None


def wants_seed(request: VllmRequest) -> bool:
    """Whether the request draws its tokens by a seed of its own."""
    return getattr(getattr(request, "sampling_params", None), "seed", None) is not None


def block_hashes(request: Any) -> Sequence[bytes]:
    """The hashes of a request's full blocks, each of which stands for all tokens up to its block's end."""
    found: Sequence[bytes] = request.block_hashes
    return found


def processed_tokens(request: Any) -> int:
    """Tokens of a request whose KV is there: of what steps under way compute it is not certain yet."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def lookahead_of(facts: Facts) -> int:
    """How many of a prompt's last tokens a prefiller with these facts leaves to its decoder, beside that of a state.

    They may be another host's.
    """
    found = facts.get(LOOKAHEAD)
    return max(0, found) if isinstance(found, int) else 0


def drop_last_tokens(request: VllmRequest, count: int) -> None:
    """The prefiller stops ``count`` tokens short of the prompt's end, where the prompt is longer than that.

    A state fits one position. The decoder has to compute the prompt's last token itself to get its first
    output, so the state it is handed must be the one before that token. Modules of a drafter that look further ahead
    (`kvd.vllm.builds.versions.lookahead`) take more off.
    """
    params = request.kv_transfer_params
    if (
        params is None
        or params.get("kvd_short")
        or request.num_prompt_tokens <= count
        or request.prompt_token_ids is None
    ):
        return
    del request.prompt_token_ids[-count:]
    del request._all_token_ids[-count:]  # noqa: SLF001 - vLLM keeps the token list in two places
    request.num_prompt_tokens -= count
    request.max_tokens = 1
    params["kvd_short"] = True
