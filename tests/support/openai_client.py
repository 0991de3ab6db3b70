"""A client of OpenAI servers that says how long an answer took, and brings streams into the form of whole answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: Mapping[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONGEST_WAIT = 240.0
"""Seconds after which a test says that an answer does not come."""
CLOSE = 0.01
"""Difference of log probabilities that is none."""

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """One request: its path and what its body has beside `GREEDY`."""

    path: str
    body: Body


@dataclass(frozen=True)
class Reply:
    """What came: HTTP's status, 0 where the connection broke; choices as `choices_of` says; how long it took.

    ``usage`` are the prompt's and the answer's tokens, where they came.
    """

    status: int
    choices: tuple[tuple[Any, ...], ...]
    seconds: float
    error: str = ""
    usage: tuple[int, int] | None = None


def ask(url: str, asked: Asked, **more: Any) -> Reply:
    """The answer to a request, with ``more`` in its body."""
    began = time.monotonic()
    body = {**GREEDY, **asked.body, **more}
    try:
        connection, response = answered(url, asked.path, body)
        try:
            text = response.read().decode()
        finally:
            connection.close()
    except (OSError, HTTPException) as error:
        return Reply(0, (), time.monotonic() - began, repr(error))
    seconds = time.monotonic() - began
    if response.status != 200:
        return Reply(response.status, (), seconds, text)
    if not body.get("stream"):
        whole = json.loads(text)
        return Reply(200, choices_of([whole]), seconds, usage=usage_of([whole]))
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return Reply(0, (), seconds, f"the stream broke off: {text[-200:]}")
    events = [json.loads(line) for line in lines[:-1]]
    if broken := [event["error"] for event in events if "error" in event]:
        return Reply(0, (), seconds, str(broken))
    return Reply(200, choices_of(events), seconds, usage=usage_of(events))


def ask_at_once(url: str, requests: Sequence[Asked]) -> list[Reply]:
    """The answers to requests that are sent at the same time."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda asked: ask(url, asked), requests))


def sent(url: str, path: str, body: Body) -> HTTPConnection:
    """A connection on which a request was sent; the caller closes it."""
    place = urlsplit(url)
    connection = HTTPConnection(str(place.hostname), place.port, timeout=LONGEST_WAIT)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    except BaseException:
        connection.close()
        raise
    return connection


def answered(url: str, path: str, body: Body) -> tuple[HTTPConnection, HTTPResponse]:
    """The same, and the answer whose head has come on it."""
    connection = sent(url, path, body)
    try:
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def choices_of(events: Sequence[Mapping[str, Any]]) -> tuple[tuple[Any, ...], ...]:
    """For each choice, by index: its text, why it ended, its tokens and those of the prompt with log probabilities."""
    found: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], ["", None, [], []])
            words = choice.get("message") or choice.get("delta") or choice
            one[0] += words.get("text") or words.get("content") or ""
            one[1] = choice.get("finish_reason") or one[1]
            one[2] += tokens_of(choice.get("logprobs") or {})
            for place in (choice.get("prompt_logprobs") or event.get("prompt_logprobs") or [])[1:]:
                one[3].append(tuple(sorted((token, entry["logprob"]) for token, entry in place.items())))
    return tuple((index, *map(_frozen, found[index])) for index in sorted(found))


def usage_of(events: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Tokens of the prompts and of the answers, None where nobody asked for them."""
    said = [event["usage"] for event in events if event.get("usage")]
    return (said[-1]["prompt_tokens"], said[-1]["completion_tokens"]) if said else None


def tokens_of(logprobs: Mapping[str, Any]) -> list[Any]:
    """Tokens and their log probabilities, of a completion's form or of a chat's."""
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"] or []]
    return list(zip(logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], strict=True))


def agree(one: Any, other: Any) -> bool:
    """Whether choices are the same but for the last bits of log probabilities: sums differ in other company."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(agree, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < CLOSE
    return bool(one == other)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
