"""What comparing prompts costs a request, against doing without: the digest and the seal of params, made and checked.

    python benchmarks/digest.py [--tokens 1000,16000,100000] [--rounds 200] [--json]

``prefiller`` is making the params of a finished prefill, ``decoder`` reading them, each with the digest of the prompt
and the seal, and without, on one core: what a scheduler's step takes longer. With vLLM installed a last column is what
vLLM takes to hash the same prompt's blocks for its prefix cache. All ways take turns; seconds are medians.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec

from kvd.vllm.params import finished_prefill, read_remote_prefill
from kvd.vllm.prompt.digest import new_key
from kvd.vllm.prompt.parts import prompt_of
from kvd.vllm.prompt.seal import is_sealed, sealed
from kvd.worker.remote import RemotePrefill

BLOCK = 16
VOCABULARY = 150_000


def ways(tokens: int) -> dict[str, Callable[[], object]]:
    """What takes turns, for a prompt of so many tokens; the request has one token of output."""
    dice, key = random.Random(tokens), new_key()  # noqa: S311 (no secret)
    ids = [dice.randrange(VOCABULARY) for _ in range(tokens)]
    request: Any = SimpleNamespace(prompt_token_ids=ids, num_prompt_tokens=tokens, _all_token_ids=[*ids, 1])
    prefill = RemotePrefill(
        engine_id="p",
        request_id="r",
        generation="g",
        host="10.0.0.7",
        port=7766,
        tokens=tokens,
        blocks=(tuple(range(-(-tokens // BLOCK))),),
        first_blocks=(0,),
        lease_seconds=30.0,
        lease_opened=time.time(),
        digest=prompt_of(request).digest(key, tokens),
    )
    params = json.loads(json.dumps(finished_prefill(sealed(key, prefill), tp=1, pp=1, dcp=1)))

    def make(*, digest: bool) -> object:
        made = prefill
        if digest:
            made = msgspec.structs.replace(prefill, digest=prompt_of(request).digest(key, tokens))
            made = sealed(key, made)
        return finished_prefill(made, tp=1, pp=1, dcp=1)

    def read(*, digest: bool) -> object:
        found = read_remote_prefill(params, own_engine_id="d")
        if digest and prompt_of(request).digest(key, found.tokens) != found.digest:
            raise SystemExit("the digests of one prompt differ")
        if digest and not is_sealed(key, found):
            raise SystemExit("the seal of params that nobody changed does not hold")
        return found

    found: dict[str, Callable[[], object]] = {
        "prefiller without": lambda: make(digest=False),
        "prefiller": lambda: make(digest=True),
        "decoder without": lambda: read(digest=False),
        "decoder": lambda: read(digest=True),
    }
    if hashing := block_hashes(ids):
        found["vLLM's block hashes"] = hashing
    return found


def block_hashes(ids: list[int]) -> Callable[[], object] | None:
    """The prompt hashed by vLLM, with its default function; None without vLLM."""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    except ImportError:
        return None
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK, function)
    bare: Any = SimpleNamespace(
        num_tokens=len(ids), all_token_ids=ids, mm_features=[], lora_request=None, cache_salt=None,
        prompt_embeds=None, block_hashes=[],
    )  # fmt: skip
    return lambda: hasher(bare)


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """Medians in seconds of all ways."""
    todo = ways(tokens)
    times: dict[str, list[float]] = {way: [] for way in todo}
    for number in range(rounds + 1):
        for way, work in todo.items():
            if way == "vLLM's block hashes" and number % 10:
                continue  # it takes longer than all others
            began = time.perf_counter()
            work()
            if number:
                times[way].append(time.perf_counter() - began)
    return {"tokens": tokens, **{way: median(found) for way, found in times.items() if found}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1000,16000,100000", help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(int(tokens), options.rounds) for tokens in options.tokens.split(",")]
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        return
    names = list(rows[0])
    lines = [[f"{row[n]}" if n == "tokens" else f"{row[n] * 1e6:.0f} us" for n in names] for row in rows]
    sys.stdout.writelines(" | ".join(cells) + "\n" for cells in (names, *lines))


if __name__ == "__main__":
    main()
