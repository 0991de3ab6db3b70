"""vLLM's own scheduler with a connector's half in it, stepped by hand: nothing computes, kvd says yes to everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import EngineCard
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from tests.support.rigs.bench import GENERATION, KEY, Script, facts

OURS = {"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.vllm", "kv_role": "kv_both"}
PREFILLER = PeerReady(
    local_engine="d",
    peer=EngineCard(engine=facts("p"), generation=GENERATION, workers=(), digest_key=KEY),
)


class WillingKvd(Script):
    """A kvd that takes every peer for ``peer`` and knows every lease; while ``silent`` it says nothing of leases."""

    silent = False
    peer = PREFILLER

    def call(self, message: Message, timeout: float) -> Future[Message]:
        future = super().call(message, timeout)
        if isinstance(message, GetPeer):
            future.set_result(self.peer)
        elif isinstance(message, LeaseClaim) and not self.silent:
            name, generation = message.key.request_id, message.generation
            future.set_result(LeaseClaimed(request_id=name, seconds=20.0, generation=generation))
        return future

    @property
    def releases(self) -> list[str]:
        return [release.result for release in self.told(LeaseRelease)]


class SteppedScheduler:
    """A scheduler; every request that is scheduled says 7. ``groups`` are specs, one full attention if not given.

    ``ahead``: asynchronous scheduling. Each step is scheduled before it is known what came of the one before. The
    scheduler is the one that ``choose`` puts into the configuration, as a worker may. ``parallel`` is how its workers
    share the work, of which there are none: it is not asked whether this machine's could.
    """

    def __init__(  # noqa: PLR0913 - what a scheduler is made of
        self,
        model: Path,
        connector: dict[str, Any],
        groups: Sequence[Any] = (),
        *,
        block: int,
        pool: int = 100,
        longest: int = 1024,
        chunk: int = 256,
        ahead: bool = False,
        choose: Callable[[Any], None] | None = None,
        parallel: dict[str, Any] | None = None,
    ) -> None:
        from vllm.config import (
            CacheConfig,
            KVTransferConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        specs = tuple(groups) or (attention(block),)
        modes = {getattr(spec, "mamba_cache_mode", "none") for spec in specs} - {"none"}
        cache = CacheConfig(
            block_size=block, enable_prefix_caching=True, mamba_cache_mode=modes.pop() if modes else "none"
        )
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", seed=1),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=longest, is_encoder_decoder=False
            ),
            cache_config=cache,
            kv_transfer_config=KVTransferConfig(
                **{"engine_id": "d", "kv_load_failure_policy": "recompute", **connector}
            ),
        )
        config.parallel_config = ParallelConfig(**(parallel or {}))
        cache.num_gpu_blocks = pool
        caches = KVCacheConfig(
            num_blocks=pool,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
        )
        whole, hashed = resolve_kv_cache_block_sizes(caches, config)
        self.hashed = hashed
        config.scheduler_config.async_scheduling = ahead  # a CPU's configuration has it off
        if choose is not None:
            choose(config)
        self.config, self.caches = config, caches
        self._ahead, self._under_way = int(ahead), deque[tuple[Any, Any]]()
        self.outputs: list[Any] = []
        """What the last step gave to those who asked."""
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=caches,
            block_size=whole,
            hash_block_size=hashed,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )

    def arrive(self, name: str, tokens: Sequence[int], params: dict[str, Any] | None, **sampling: Any) -> Any:
        """A request with this prompt, for five tokens unless ``sampling`` says otherwise."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        extra = {"kv_transfer_params": params} if params else {}
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                **{"max_tokens": 5, "ignore_eos": True, "extra_args": extra, **sampling}
            ),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.hashed, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def step(self, **told: Any) -> tuple[dict[str, int], Any]:
        """One step, at whose end workers tell of transfers: the tokens that it computes, what it tells the workers."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        chunks = [self.scheduler.requests[name].is_prefill_chunk for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[] if chunk else [7] for chunk in chunks],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(**told) if told else None,
        )
        self._under_way.append((output, result))
        self.outputs = []
        if len(self._under_way) > self._ahead:
            answers = self.scheduler.update_from_output(*self._under_way.popleft())
            self.outputs = [one for client in answers.values() for one in client.outputs]
        return dict(output.num_scheduled_tokens), output.kv_connector_metadata

    def settle(self) -> None:
        """Take what came of all steps that are under way."""
        while self._under_way:
            self.scheduler.update_from_output(*self._under_way.popleft())

    @property
    def under_way(self) -> bool:
        """Whether a step computes something of which nobody has heard yet."""
        return any(output.num_scheduled_tokens for output, _ in self._under_way)

    def run_out(self) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_unfinished_requests():
            self.step()


def attention(block: int) -> Any:
    """A layer of full attention."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32)


def latents(block: int) -> Any:
    """A layer of latents, of which all ranks hold the same (MLA)."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=48, dtype=torch.float32)
