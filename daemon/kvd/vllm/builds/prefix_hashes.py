"""How the installed vLLM names blocks of its prefix cache, and what it takes for engines to share what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvd.backends.registry import stages
from kvd.vllm.errors import UnsupportedBuild
from kvd.worker.settings import ConnectorSettings

ALGORITHMS = ("sha256", "sha256_cbor")
"""Whose hashes are names of what they hold: with others, two prompts may have one hash."""


def prefix_scheme(vllm_config: Any, settings: ConnectorSettings) -> str:
    """The name of the way in which hashes are made: equal where equal hashes mean equal tokens; empty if not shared.

    Raises `UnsupportedBuild` where prefixes are to be shared and cannot be.
    """
    if settings.prefixes == "off":
        return ""
    cache, algorithm = vllm_config.cache_config, vllm_config.cache_config.prefix_caching_hash_algo
    wrong = ""
    if not cache.enable_prefix_caching:
        wrong = "prefix caching is off: turn it on (--enable-prefix-caching)"
    elif algorithm not in ALGORITHMS:
        wrong = f"--prefix-caching-hash-algo is {algorithm}: it must be {' or '.join(ALGORITHMS)}"
    elif stages(settings.backend):
        wrong = f"backend {settings.backend} shows peers copies alone, not the cache: take another backend"
    elif getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "fail") != "recompute":
        wrong = 'kv_load_failure_policy must be "recompute": what a peer no longer holds is computed here'
    elif getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) > 1:
        wrong = "this engine has workers on several hosts: it takes all of them on one"
    elif getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        wrong = "HiSparse is on: of a block that is given away vLLM tells one of the two alone. Leave one of them out"
    if wrong:
        raise UnsupportedBuild(f'prefixes is "on" and {wrong}')
    return f"{algorithm}/{hashlib.sha256(_seed(algorithm).encode()).hexdigest()[:16]}"


def hashes_of(scheme: str, tokens: Sequence[int], hash_tokens: int) -> list[bytes]:
    """The hashes of a prompt's full blocks, as vLLM makes them in this process for plain text without a salt."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    function = get_hash_fn_by_name(scheme.partition("/")[0])
    made: list[bytes] = []
    for at in range(0, len(tokens) - hash_tokens + 1, hash_tokens):
        made.append(hash_block_tokens(function, made[-1] if made else None, tokens[at : at + hash_tokens]))
    return made


def _seed(algorithm: str) -> str:
    """What the first block's hash is made with: PYTHONHASHSEED, or what vLLM takes for this algorithm."""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
    except ImportError:
        raise UnsupportedBuild(
            'prefixes is "on" and this vLLM makes other hashes in each process; leave it out, or use vLLM 0.32 or later'
        ) from None
    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))
