"""From vLLM's request to what its prompt's digest covers."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.vllm.prompt_digest import Embeds, Feature, PromptParts, prompt_digest
from kvd.vllm.requests import Request
from kvd.weights.adapter import loaded_adapter

_COUNTER = re.compile(r"renderer\d+-mm-\d+-")
"""How vLLM names an item that it did not hash, as both of its caches are off: by a number of this process's own."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt, of which digests can be made; ``tokens`` is its length."""

    request: Request
    tokens: int

    def digest(self, key: bytes, tokens: int) -> str:
        """The digest of its first ``tokens`` tokens under a prefiller's key."""
        return prompt_digest(key, prompt_parts(self.request, tokens), tokens)


def prompt_of(request: Request) -> Prompt:
    """The prompt of a request as it is now."""
    return Prompt(request, request.num_prompt_tokens)


def prompt_parts(request: Request, tokens: int) -> PromptParts:
    """What decides the KV of the first ``tokens`` tokens of a request's prompt."""
    return PromptParts(
        token_ids=_token_ids(request),
        adapter=_adapter(getattr(request, "lora_request", None)),
        features=[_feature(found) for found in getattr(request, "mm_features", None) or ()],
        cache_salt=getattr(request, "cache_salt", None) or "",
        embeds=_embeds(request, tokens),
    )


def _token_ids(request: Request) -> Sequence[int]:
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
    return loaded_adapter(lora.lora_int_id, lora.lora_path, anew=bool(getattr(lora, "load_inplace", False)))


def _feature(found: Any) -> Feature:
    """An item under the hash of its content; ``identifier`` may have an adapter's name before it."""
    position = found.mm_position
    identifier = getattr(found, "mm_hash", None) or found.identifier
    if _COUNTER.match(identifier):
        identifier = _content(found.data)
    return Feature(found.modality, identifier, position.offset, position.length)


def _content(item: Any) -> str:
    """A hash of an item as its processor made it; where it is not here nothing can be said, so it is like no other."""
    if item is None:
        return secrets.token_hex(16)
    hashed = hashlib.sha256()
    for name, element in sorted(item.items()):
        hashed.update(f"{name}\0".encode())
        _hash_nested(hashed, element.data)
    return hashed.hexdigest()


def _hash_nested(hashed: Any, data: Any) -> None:
    """Add tensors, numbers and text to a hash, in lists and mappings too."""
    if isinstance(data, Mapping):
        data = sorted(data.items())
    if isinstance(data, (list, tuple)):
        hashed.update(f"[{len(data)}\0".encode())
        for part in data:
            _hash_nested(hashed, part)
    elif hasattr(data, "detach"):
        hashed.update(f"{data.dtype} {tuple(data.shape)}\0".encode())
        hashed.update(_tensor_bytes(data))
    else:
        hashed.update(f"{type(data).__name__} {data!r}\0".encode("utf-8", "surrogatepass"))


def _tensor_bytes(tensor: Any) -> memoryview:
    import torch  # who gives tensors has it loaded

    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _embeds(request: Request, tokens: int) -> Embeds | None:
    tensor = getattr(request, "prompt_embeds", None)
    if tensor is None:
        return None
    rows = tensor[:tokens]
    form = f"{rows.dtype} {tuple(rows.shape[1:])}"
    return Embeds(_tensor_bytes(rows), form, getattr(request, "prompt_is_token_ids", None) or ())
