"""What a vLLM engine of the demo runs with: vLLM's arguments, the engine's folders and environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What to run. Sizes are bytes, lengths are tokens.

    Attributes:
        model: folder of a model and its tokenizer.
        work_dir: everything that vLLM and its libraries write goes below this folder, which is made if missing.
        log_path: receives stdout and stderr of the whole tree.
        dtype: as vLLM names it.
        max_model_len: longest prompt plus answer.
        kv_cache_memory_bytes: size of the KV cache of each worker.
        max_num_seqs: most requests in one step.
        block_size: tokens a KV block, or None for vLLM's own choice.
        tensor_parallel_size: number of workers.
        enable_prefix_caching: whether finished blocks may serve later requests.
        max_num_batched_tokens: most tokens in one step (prefills are split at it), or None for vLLM's own choice.
        forced_first_tokens: whether `submit` may name the token to be said first (kvctl.demo.reference).
        kv_transfer_config: the connector's configuration, with vLLM's keys, or None.
        arguments: further arguments of vLLM's own, under its names and stronger than all of these.
        cache_dir: vLLM's cache of what it found out about model classes, or None for one in `work_dir`. Engines that
            share it start faster: finding out costs a process that imports vLLM.
        env: environment variables for this engine, stronger than the ones it would get otherwise.
    """

    model: Path
    work_dir: Path
    log_path: Path
    dtype: str = "float32"
    max_model_len: int = 4096
    kv_cache_memory_bytes: int = 64 * MIB
    max_num_seqs: int = 8
    block_size: int | None = None
    tensor_parallel_size: int = 1
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int | None = None
    forced_first_tokens: bool = False
    kv_transfer_config: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """The part of a spec that vLLM reads, under vLLM's names; what is None is left to vLLM."""
    ours = ("work_dir", "log_path", "cache_dir", "env", "forced_first_tokens", "arguments")
    values = {
        item.name: getattr(spec, item.name) for item in dataclasses.fields(spec) if item.name not in ours
    }
    values["model"] = str(spec.model)
    if spec.forced_first_tokens:
        values["logits_processors"] = ["kvctl.demo.reference:ForcedFirstToken"]
    return {key: value for key, value in values.items() if value is not None} | dict(spec.arguments)


def environment(spec: EngineSpec, sockets: Path) -> dict[str, str]:
    """The environment of an engine: ours, with every folder that its libraries write to moved below the work folder.

    `sockets` is a folder with a short path, for Unix sockets.
    """
    work = spec.work_dir
    made = {
        "VLLM_CACHE_ROOT": spec.cache_dir or work / "vllm-cache",
        "VLLM_CONFIG_ROOT": work / "vllm-config",
        "XDG_CACHE_HOME": work / "cache",
        "XDG_CONFIG_HOME": work / "config",
        "XDG_DATA_HOME": work / "data",
        "HF_HOME": work / "huggingface",
        "TORCHINDUCTOR_CACHE_DIR": (spec.cache_dir or work) / "inductor",
        "TRITON_CACHE_DIR": work / "triton",
        "VLLM_RPC_BASE_PATH": sockets,
        "TMPDIR": sockets,
        "VLLM_NO_USAGE_STATS": 1,
        "DO_NOT_TRACK": 1,
        "HF_HUB_OFFLINE": 1,
        "TOKENIZERS_PARALLELISM": "false",
        # A tiny model on a few cores: threads of several engines would only wait for each other.
        "OMP_NUM_THREADS": 1,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    inherited = dict(os.environ)
    # It would override the size in bytes that the spec asks for.
    inherited.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return inherited | {key: str(value) for key, value in made.items()} | dict(spec.env)
