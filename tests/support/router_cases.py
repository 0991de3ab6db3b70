"""Requests as clients send them through routers, each with how many loads serve it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.deployments import prompt_of
from tests.support.openai_client import CHAT, COMPLETIONS, Asked

TIES: Mapping[str, float] = {str(token): token * 1e-5 for token in range(512)}
"""Added to the logits, it decides between equal ones; in bfloat16 there are some, and others differ by far more."""
TWO: Mapping[str, Any] = {"n": 2, "temperature": 1.0, "top_k": 1, "logit_bias": TIES}
"""Two answers to one prompt, both of the likeliest tokens: vLLM gives no two greedy ones."""


@dataclass(frozen=True)
class Case:
    """A request; it is served by so many loads, at least and at most.

    Of two readers of one lease the second computes where the first has loaded all and released it before.
    """

    asked: Asked
    least: int = 1
    most: int = 1


def text_of(tokens: int, seed: int) -> str:
    """A text of so many tokens: the tiny models' tokenizer makes one of each letter."""
    rng = random.Random(f"text {tokens}/{seed}")
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(tokens))


def completion(prompt: Any, **more: Any) -> Asked:
    """A completion of a text, of tokens, or of a list of either."""
    return Asked(COMPLETIONS, {"prompt": prompt, **more})


def chat(text: str, **more: Any) -> Asked:
    """A chat with one message."""
    return Asked(CHAT, {"messages": [{"role": "user", "content": text}], **more})


def cases(tokens: int) -> Mapping[str, Case]:
    """Requests with prompts of so many tokens, by what is asked for.

    vLLM hands over what the first prompt of a list needs; the others' KV is not to be had.
    """
    ids = [prompt_of(tokens, seed) for seed in range(20)]
    texts = [text_of(tokens, seed) for seed in range(20)]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "a text": Case(completion(texts[0])),
        "tokens": Case(completion(ids[0])),
        "a stream": Case(completion(ids[1], **usage)),
        "n 2": Case(completion(ids[2], **TWO), most=2),
        "n 2 in a stream": Case(completion(ids[3], stream=True, **TWO), most=2),
        "two texts": Case(completion(texts[1:3])),
        "two prompts of tokens": Case(completion(ids[4:6])),
        "three prompts in a stream": Case(completion(ids[6:9], stream=True)),
        "one prompt twice": Case(completion([ids[9], ids[9]]), most=2),
        "two prompts and n 2": Case(completion(ids[10:12], **TWO), most=2),
        "logprobs": Case(completion(ids[12], logprobs=3)),
        "logprobs in a stream": Case(completion(ids[13], logprobs=0, stream=True)),
        "min_tokens": Case(completion(ids[14], min_tokens=20, ignore_eos=False)),
        "one token": Case(completion(ids[15], max_tokens=1)),
        "the first token ends it": Case(completion(ids[15], stop_token_ids=list(range(512)))),
        "echo": Case(completion(ids[16], echo=True)),
        "echo with logprobs in a stream": Case(
            completion(ids[17], echo=True, logprobs=1, stream=True), least=0, most=0
        ),
        "prompt_logprobs": Case(completion(ids[18], prompt_logprobs=1), least=0, most=0),
        "a chat": Case(chat(texts[3])),
        "a chat in a stream": Case(chat(texts[4], **usage)),
        "a chat with max_completion_tokens": Case(chat(texts[5], max_completion_tokens=7, max_tokens=None)),
        "a chat with n 2": Case(chat(texts[6], stream=True, **TWO), most=2),
        "a chat with logprobs": Case(chat(texts[7], logprobs=True, top_logprobs=2)),
    }


def many(tokens: int, count: int) -> list[Asked]:
    """So many requests of several kinds, no two alike."""
    made = []
    for number in range(count):
        ids, text = prompt_of(tokens, 1000 + number), text_of(tokens, 1000 + number)
        kinds = (
            completion(ids),
            completion(ids, stream=True),
            chat(text),
            completion(ids, **TWO),
            completion([ids, prompt_of(tokens, 2000 + number)]),
            chat(text, stream=True),
            completion(text, logprobs=1),
            completion(ids, max_tokens=3),
        )
        made.append(kinds[number % len(kinds)])
    return made


OF_OTHERS: Mapping[str, Any] = {
    "unfinished": {"do_remote_prefill": True, "remote_engine_id": "nobody"},
    "of the stock connector": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4, 5]],
        "remote_engine_id": "5e1e0e8c-9a5f-4b43-a4f0-1d4be3f8f1d2",
        "remote_request_id": "cmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    },
    "of wrong types": {"do_remote_prefill": "yes", "remote_block_ids": "all", "kvd_contract": [1]},
    "asking the decoder to keep its blocks": {"do_remote_decode": True},
    "empty": {},
    "null": None,
}
"""kv_transfer_params that no prefiller with KvdConnector gave."""
