"""What stands behind NixlConnector's compatibility hash.

It is one SHA-256 over the JSON of about a dozen factors, so by itself it never says which of them differs. But each of
them has few values: vLLM's version, two types, the model as it was named, the manager of hybrid caches. So they are
tried, and where a try has the same hash, all of them are known for certain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kvctl.stock.nixl_metadata import StockWorker

MOST_TRIES = 400_000
"""Hashes: about a second."""
VLLM_VERSIONS = (
    "0.32.0", "0.33.0", "0.26.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.27.0", "0.32.1", "0.31.1",
    "0.30.1", "0.29.1", "0.28.1", "0.26.1", "0.33.1",
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32")
MODES = ("pull", "push")
_WITH_CROSS_LAYERS, _WITH_SPECULATION, _WITH_MODE = 13, 6, 7
"""The last version of the connector whose hash may have the first, and the first versions with the others."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as an engine may have been started with: its name or path there, and what its configuration says."""

    names: tuple[str, ...]
    kv_heads: int
    head_size: int
    layers: int


@dataclass(frozen=True, slots=True)
class OpenedHash:
    """Every factor that the engine's hash was made of."""

    model: str
    vllm_version: str
    nixl_connector_version: int
    dtype: str
    cache_dtype: str
    kv_heads: int
    head_size: int
    layers: int
    transfer_mode: str | None
    hybrid_manager: bool


def opened(worker: StockWorker, model: NamedModel, versions: tuple[str, ...] = ()) -> OpenedHash | None:
    """The factors whose hash is the worker's; None where no try has it, say with a speculative drafter.

    ``versions`` of vLLM are tried before those that are known.
    """
    wanted = worker.compatibility_hash
    for number, (factors, found) in enumerate(_tries(worker, model, versions)):
        if number == MOST_TRIES:
            return None
        if hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest() == wanted:
            return found
    return None


def _tries(
    worker: StockWorker, model: NamedModel, versions: tuple[str, ...]
) -> Iterator[tuple[dict[str, object], OpenedHash]]:
    generation = worker.generation
    for version, number, name, dtype, cache_dtype, hybrid in product(
        dict.fromkeys((*versions, *VLLM_VERSIONS)),
        range(generation.first, generation.last + 1),
        model.names,
        DTYPES,
        CACHE_DTYPES,
        (True, False),
    ):
        factors: dict[str, object] = {
            "vllm_version": version,
            "nixl_connector_version": number,
            "model": name,
            "dtype": f"torch.{dtype}",
            "num_kv_heads": model.kv_heads,
            "head_size": model.head_size,
            "num_hidden_layers": model.layers,
            "attn_backend_name": worker.metadata.attn_backend_name,
            "cache_dtype": cache_dtype,
            "is_hma_enabled": hybrid,
        }
        if number >= _WITH_SPECULATION:
            factors["speculative_config"] = None
        modes = MODES if number >= _WITH_MODE else (None,)
        # Which version dropped this factor is not known: both are tried between.
        crossed = (False, True, None) if _WITH_SPECULATION <= number <= _WITH_CROSS_LAYERS else (False, True)
        for mode, cross in product(modes, crossed if number <= _WITH_CROSS_LAYERS else (None,)):
            more: dict[str, object] = {} if mode is None else {"transfer_mode": mode}
            if cross is not None:
                more["cross_layers_blocks"] = cross
            found = OpenedHash(
                name,
                version,
                number,
                dtype,
                cache_dtype,
                model.kv_heads,
                model.head_size,
                model.layers,
                mode,
                hybrid,
            )
            yield factors | more, found
