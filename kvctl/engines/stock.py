"""Engines behind stock connectors: ``nixl://HOST:PORT``, ``mooncake://HOST:PORT``, then another colon and options.

The handshake tells block sizes, lengths and layouts, and not the model, its types or the parallel size. What it does
not tell stays unknown, or comes from options: ``nixl://decode-0:5600:model=qwen3-32b,tp=4``. With the model every page
is known byte for byte, and is held against what the handshake tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvctl.cli.parsing import near_misses
from kvctl.engines.models import SUFFIXES, config_shape, preset_shape, read_document
from kvctl.engines.options import EngineOptions, parse_engine_options
from kvctl.errors import CheckFailed, UsageError
from kvctl.stock import mooncake_bootstrap, side_channel
from kvctl.stock.compatibility_hash import NamedModel, OpenedHash, opened
from kvctl.stock.mooncake_bootstrap import RegisteredEngine
from kvctl.stock.nixl_metadata import StockWorker, decode
from kvd.geometry.config import LAYOUTS, CacheOptions, Parallel, engine_from_shape
from kvd.geometry.errors import GeometryError, UnevenShard
from kvd.geometry.families import AttentionShape, LatentShape, ModelShape
from kvd.geometry.model import EngineGeometry

Scheme = Literal["nixl", "mooncake"]
StockFacts = dict[str, str | int | float | bool | None]

NIXL, MOONCAKE = "NixlConnector", "MooncakeConnector"
TRIED_TP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Tensor parallel sizes that are held against the lengths of blocks where none was given."""
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z]+)://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})(?::(?P<options>.*))?"
)
_OWN = ("model", "name", "vllm", "dp")
_WRITE = (
    "write nixl://HOST:PORT or mooncake://HOST:PORT, with options behind another colon: model=qwen3-32b,tp=4"
)


class StockMismatch(CheckFailed):
    """What a stock engine tells of its memory does not go with the model or the sizes that were given for it."""

    code = "KVD-STOCK-MODEL"


@dataclass(frozen=True)
class StockAddress:
    """Where a stock connector is asked, and what was given of its engine.

    ``model`` is a preset or a path, ``name`` what the engine calls it (vllm serve NAME), ``vllm`` its version, ``dp`` a
    data parallel rank; ``typed`` are the names of the options that were given.
    """

    scheme: Scheme
    host: str
    port: int
    options: EngineOptions
    typed: frozenset[str]
    model: str = ""
    name: str = ""
    vllm: str = ""
    dp: str = ""

    @property
    def text(self) -> str:
        """``nixl://HOST:PORT``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def stock_address(text: str) -> StockAddress | None:
    """The address that ``text`` is; None where it is none. Raises `UsageError` for one that is wrong."""
    if "://" not in text:
        return None
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(f"{text!r} is no address of a stock connector", _WRITE)
    scheme: Scheme
    if match["scheme"] == "nixl":
        scheme = "nixl"
    elif match["scheme"] == "mooncake":
        scheme = "mooncake"
    else:
        raise UsageError(
            f"no connector {match['scheme']!r}; {near_misses(match['scheme'], ('nixl', 'mooncake'))}", _WRITE
        )
    parts = [part.strip() for part in (match["options"] or "").split(",") if part.strip()]
    own = {name: value for name, _, value in (part.partition("=") for part in parts) if name in _OWN}
    others = [part for part in parts if part.partition("=")[0] not in _OWN]
    typed = frozenset(part.partition("=")[0].replace("-", "_") for part in parts)
    options = parse_engine_options(",".join(others))
    return StockAddress(scheme, match["host"].strip("[]"), int(match["port"]), options, typed, **own)


def stock_engine(address: StockAddress, seconds: float = side_channel.SECONDS) -> EngineGeometry:
    """The engine behind an address: without workers where the model was not given. Each question may take ``seconds``.

    Raises `StockUnreachable`, `StockSilent`, `StockGarbage`, `StockMismatch`, and `UsageError` for wrong options.
    """
    return _nixl(address, seconds) if address.scheme == "nixl" else _mooncake(address, seconds)


def asked(address: StockAddress, seconds: float) -> StockWorker:
    """The first worker of a NixlConnector's engine: the only one that is there for certain."""
    answer = side_channel.ask(address.host, address.port, seconds=seconds)
    return decode(answer.payload, address.text)


def _nixl(address: StockAddress, seconds: float) -> EngineGeometry:
    worker = asked(address, seconds)
    told = worker.metadata
    shape = _shape(address)
    key = opened(worker, _named(address, shape), (address.vllm,) if address.vllm else ()) if shape else None
    facts = _nixl_facts(address, worker, key)
    if shape is None:
        return _undescribed(address, told.engine_id, worker.incarnation, facts, dcp=told.dcp_size or 0)
    physical = told.physical_blocks_per_logical_kv_block
    cache = replace(
        address.options.cache,
        block_size=told.block_size * physical,
        kernel_block=told.block_size,
        layout=told.kv_cache_layout,
        num_blocks=max(1, told.num_blocks // physical),
    )
    if key is not None:
        cache = replace(cache, dtype=key.dtype, cache_dtype=key.cache_dtype)
    parallel = replace(address.options.parallel, dcp=told.dcp_size or address.options.parallel.dcp)
    fitting = _fitting(address, shape, parallel, cache, sum(told.block_lens) * physical)
    engine = _chosen(address, fitting)
    # Rank 0 alone was asked. Nothing that it tells proves another: half the layers with twice the heads, as pipeline
    # stages have, are as long; and a question for a rank that is not there ends the listener.
    return replace(
        engine,
        engine_id=told.engine_id,
        generation=worker.incarnation,
        facts=_merged(address, engine.facts, facts, key),
    )


def _nixl_facts(address: StockAddress, worker: StockWorker, key: OpenedHash | None) -> StockFacts:
    told = worker.metadata
    facts: StockFacts = {
        "connector": NIXL,
        "handshake": worker.generation.shown,
        "compatibility_hash": worker.compatibility_hash[:16],
        "layout": LAYOUTS.get(told.kv_cache_layout, told.kv_cache_layout),
        "attention_backend": told.attn_backend_name,
        "block_size": told.block_size * told.physical_blocks_per_logical_kv_block,
        "regions": len(told.block_lens),
        "bytes_per_block": sum(told.block_lens) * told.physical_blocks_per_logical_kv_block,
    }
    if told.physical_blocks_per_logical_kv_block > 1:
        facts["kernel_block_size"] = told.block_size
    if any(told.ssm_sizes):
        facts["state_bytes"] = "+".join(map(str, told.ssm_sizes))
    if told.region_mem_types:
        facts["memory"] = ", ".join(dict.fromkeys(told.region_mem_types))
    if address.vllm:
        facts["vllm_version"] = address.vllm
    if key is not None:
        facts |= {
            "vllm_version": key.vllm_version,
            "hybrid_manager": key.hybrid_manager,
            "dtype": key.dtype,
            "cache_dtype": key.cache_dtype,
        }
        if key.transfer_mode:
            facts["transfer_mode"] = key.transfer_mode
    return facts


def _merged(
    address: StockAddress, planned: StockFacts, told: StockFacts, key: OpenedHash | None
) -> StockFacts:
    """What is told, over what follows from the model; defaults that nobody told or typed are left out."""
    assumed = {"dtype", "cache_dtype", "speculative_tokens", "layout"} - address.typed
    if key is not None:
        assumed -= {"dtype", "cache_dtype"}
    return {name: value for name, value in planned.items() if name not in assumed} | told


def _named(address: StockAddress, shape: ModelShape) -> NamedModel:
    """The model as its hash may have it."""
    attention = next((x.shape for x in shape.layers if isinstance(x.shape, AttentionShape)), None)
    latent = next((x.shape for x in shape.layers if isinstance(x.shape, LatentShape)), None)
    names = (address.name, address.model, str(Path(address.model).expanduser()), shape.name)
    return NamedModel(
        tuple(dict.fromkeys(filter(None, names))),
        kv_heads=attention.heads if attention else 1,
        head_size=attention.key_size if attention else latent.size if latent else 0,
        layers=shape.depth,
    )


def _shape(address: StockAddress) -> ModelShape | None:
    if not address.model:
        return None
    path = Path(address.model).expanduser()
    if path.suffix not in SUFFIXES and not path.is_dir():
        return preset_shape(address.model)
    path = path / "config.json" if path.is_dir() else path
    plain = read_document(path)
    if not isinstance(plain, dict):
        raise UsageError(f"{path} holds a {type(plain).__name__} and no model's configuration")
    return config_shape(plain, path)


def _fitting(
    address: StockAddress, shape: ModelShape, parallel: Parallel, cache: CacheOptions, told: int
) -> dict[int, EngineGeometry]:
    """The engines whose blocks are as long as those that are told, by tensor parallel size.

    Raises `StockMismatch` where none is.
    """
    sizes = (parallel.tp,) if "tp" in address.typed else TRIED_TP
    found, seen = {}, []
    for tp in sizes:
        try:
            engine = engine_from_shape(shape, replace(parallel, tp=tp), cache, engine_id=address.text)
        except UnevenShard:
            continue
        except GeometryError as error:
            raise StockMismatch(
                f"{address.text} with {address.model}: {error}", "leave model= out", error.code
            ) from None
        length = engine.workers[0].regions[0].length // cache.num_blocks
        seen.append(f"{length} (tp={tp})")
        if length == told:
            found[tp] = engine
    if not found:
        raise StockMismatch(
            f"{address.text} tells {told} bytes a block on rank 0; {address.model} would have"
            f" {', '.join(seen) or 'no such split'}",
            "give the model, tp=, pp=, dtype= and cache_dtype= that the engine was started with; without model= what"
            " the handshake tells is compared",
        )
    return found


def _chosen(address: StockAddress, fitting: dict[int, EngineGeometry]) -> EngineGeometry:
    if len(fitting) > 1:
        raise UsageError(
            f"{address.text}: the handshake does not tell the tensor parallel size, and blocks of that length go with"
            f" {', '.join(map(str, fitting))}",
            f"give it: {address.text}:model={address.model},tp={min(fitting)}",
        )
    return next(iter(fitting.values()))


def _undescribed(
    address: StockAddress,
    engine_id: str,
    generation: str,
    facts: StockFacts,
    *,
    tp: int = 0,
    pp: int = 0,
    dcp: int = 0,
) -> EngineGeometry:
    """An engine of which no page is known; sizes that nobody told are 0."""
    given = address.options.parallel
    return EngineGeometry(
        engine_id,
        generation,
        model="",
        tp=given.tp if "tp" in address.typed else tp,
        pp=given.pp if "pp" in address.typed else pp,
        dcp=dcp,
        workers=(),
        facts=facts,
    )


def _mooncake(address: StockAddress, seconds: float) -> EngineGeometry:
    registered = registered_engine(address, seconds)
    if registered.missing:
        ranks = ", ".join(f"tp{tp}" + f".pp{pp}" * bool(pp) for pp, tp in registered.missing)
        raise StockMismatch(
            f"{address.text}: of {registered.engine_id} {len(registered.workers)} of {registered.tp * registered.pp}"
            f" workers have registered, not {ranks}",
            "RANK_NOT_REGISTERED: see the logs of these ranks, and restart the engine; pulls from it would hang",
        )
    facts: StockFacts = {"connector": MOONCAKE}
    shape = _shape(address)
    if shape is None:
        return _undescribed(address, registered.engine_id, "", facts, tp=registered.tp, pp=registered.pp)
    parallel = replace(address.options.parallel, tp=registered.tp, pp=registered.pp)
    try:
        engine = engine_from_shape(shape, parallel, address.options.cache, engine_id=registered.engine_id)
    except GeometryError as error:
        raise StockMismatch(
            f"{address.text} has {registered.tp} x {registered.pp} workers, and {address.model} does not: {error}",
            "give the model that it serves", error.code,
        ) from None  # fmt: skip
    return replace(engine, facts=_merged(address, engine.facts, facts, None))


def registered_engine(address: StockAddress, seconds: float) -> RegisteredEngine:
    """The one that is meant. Raises `UsageError` where there are several, `StockMismatch` where there is none."""
    engines = mooncake_bootstrap.query(address.host, address.port, seconds=seconds).engines
    chosen = [e for e in engines if not address.dp or str(e.dp) == address.dp]
    if len(chosen) > 1:
        raise UsageError(
            f"{address.text} has engines of the data parallel ranks {', '.join(str(e.dp) for e in chosen)}",
            f"give one: {address.text}:dp={chosen[0].dp}",
        )
    if not chosen:
        raise StockMismatch(
            f"no worker has registered at {address.text}"
            + (f" for the data parallel rank {address.dp}" if engines else ""),
            "RANK_NOT_REGISTERED: prefilling workers register when their KV caches are; see the engine's log",
        )
    return chosen[0]
