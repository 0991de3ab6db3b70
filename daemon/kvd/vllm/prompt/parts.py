"""From vLLM's request to what its prompt's digest covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvd.vllm.prompt.contents import content_name, tensor_bytes
from kvd.vllm.prompt.digest import Embeds, Feature, PromptParts, prompt_digest
from kvd.vllm.vllm_types import VllmRequest
from kvd.weights.adapter import loaded_adapter


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt, of which digests can be made; ``tokens`` is its length."""

    request: VllmRequest
    tokens: int

    def digest(self, key: bytes, tokens: int) -> str:
        """The digest of its first ``tokens`` tokens under a prefiller's key."""
        return prompt_digest(key, prompt_parts(self.request, tokens), tokens)


def prompt_of(request: VllmRequest) -> Prompt:
    """The prompt of a request as it is now."""
    return Prompt(request, request.num_prompt_tokens)


def prompt_parts(request: VllmRequest, tokens: int) -> PromptParts:
    """What decides the KV of the first ``tokens`` tokens of a request's prompt."""
    return PromptParts(
        token_ids=_token_ids(request),
        adapter=_adapter(getattr(request, "lora_request", None)),
        features=[_feature(found) for found in getattr(request, "mm_features", None) or ()],
        cache_salt=getattr(request, "cache_salt", None) or "",
        embeds=_embeds(request, tokens),
    )


def _token_ids(request: VllmRequest) -> Sequence[int]:
    """The tokens that the model sees: 0 where an embedding takes a token's place."""
    if request.prompt_token_ids is None:
        return ()
    if getattr(request, "prompt_is_token_ids", None) is not None:
        return request._all_token_ids  # noqa: SLF001 - the ids beside it name tokens that nobody embeds
    return request.prompt_token_ids


def _adapter(lora: Any) -> str:
    """What an adapter is, by its files; the number that vLLM gives it is this engine's own, its name a user's."""
    if lora is None:
        return ""
    return loaded_adapter(lora.lora_int_id, lora.lora_path, reload=bool(getattr(lora, "load_inplace", False)))


def _feature(found: Any) -> Feature:
    """An input under the hash of its content; ``identifier`` may have an adapter's name before it."""
    position = found.mm_position
    name = getattr(found, "mm_hash", None) or found.identifier
    content = content_name(name, found.modality, getattr(found, "data", None))
    return Feature(found.modality, content, position.offset, position.length)


def _embeds(request: VllmRequest, tokens: int) -> Embeds | None:
    tensor = getattr(request, "prompt_embeds", None)
    if tensor is None:
        return None
    rows = tensor[:tokens]
    form = f"{rows.dtype} {tuple(rows.shape[1:])}"
    return Embeds(tensor_bytes(rows), form, getattr(request, "prompt_is_token_ids", None) or ())


def is_plain_text(request: VllmRequest) -> bool:
    """Whether blocks' hashes say all that decides the KV of a request: none has what they know by a name alone."""
    return not (
        getattr(request, "lora_request", None)
        or getattr(request, "mm_features", None)
        or getattr(request, "prompt_embeds", None) is not None
    )
