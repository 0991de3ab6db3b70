"""Greedy completions from an engine's or a router's OpenAI endpoint, token by token."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvctl.errors import CheckFailed, PeerTimeout, UsageError


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer; ``params`` are the kv_transfer_params that a prefiller hands on."""

    tokens: tuple[int, ...]
    text: str
    params: Mapping[str, Any] | None


def base_url(text: str) -> str:
    """A server's URL without a path; one that ends in ``/v1`` means the same. Raises `UsageError`."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{text!r} is not the URL of a server", "write http://host:8000")
    return text.rstrip("/").removesuffix("/v1")


def served_model(url: str, timeout: float) -> str:
    """The first model that a server serves. Raises as `complete`."""
    answer = _asked(url, "/v1/models", None, {}, timeout)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise CheckFailed(f"{url} names no model", "give it with --model") from None


def complete(
    url: str,
    model: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    name: str,
    params: Mapping[str, Any] | None = None,
    timeout: float,
) -> Completion:
    """The answer to a prompt of token ids. ``name`` is its id, and keeps it apart from what is in any prefix cache.

    Raises `PeerTimeout` where nobody answers in time, `CheckFailed` for any answer but a completion.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": name,
    }
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    answer = _asked(url, "/v1/completions", body, {"X-Request-Id": name}, timeout)
    try:
        choice = answer["choices"][0]
        return Completion(
            tuple(choice["token_ids"]), str(choice.get("text", "")), answer.get("kv_transfer_params")
        )
    except (KeyError, IndexError, TypeError):
        raise CheckFailed(
            f"{url} answered without token ids",
            "`kvctl verify` compares tokens: the server has to know return_token_ids, as vLLM does",
        ) from None


def _asked(
    url: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout: float
) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url + path, data, head)  # noqa: S310 - `base_url` let only HTTP pass
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(2000).decode(errors="replace").split())
        raise CheckFailed(f"{url}{path} answered {error.code}: {said[:500]}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise PeerTimeout(
                f"{url}{path} did not answer within {timeout:g} s", "give it --timeout"
            ) from None
        raise PeerTimeout(f"{url}{path}: {reason}", "is the server there, and is this its URL?") from None
    if not isinstance(answer, dict):
        raise CheckFailed(f"{url}{path} answered with {type(answer).__name__}, not with an object")
    return answer
