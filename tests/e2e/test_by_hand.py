"""Two connectors on this vLLM's own schedulers and caches, stepped by hand: what no CPU build of a version computes.

Both halves of the connector, two kvds and NIXL are real; nothing computes, a prefill fills its blocks with noise. Runs
where vLLM's GPU runner makes its caches in one function (0.26 to 0.28).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, transfer_config
from kvctl.processes.daemons import Kvd, two_hosts
from kvd.geometry.rank import Rank
from kvd.vllm.memory.tensors import Place
from kvd.wire.order import ForceMiss, NextLoads
from tests.e2e.test_gpu_caches import attention, made
from tests.e2e.test_gpu_caches import reshape as reshape  # noqa: PLC0414 - a fixture
from tests.support.daemons import wait_for
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]

PROMPT = 100
BLOCK = 16
POOL = 40
CHUNK = 64
KINDS = ("full", "window+full", "states+full", "latents")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("models"))


def groups_of(kinds: str) -> Sequence[tuple[Any, tuple[str, ...], Any, int]]:
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    full = (FullAttentionSpec(**shape), ("a0", "a1"), attention("triton"), BLOCK)
    window = (SlidingWindowSpec(**shape, sliding_window=40), ("w0", "w1"), attention("triton"), BLOCK)
    state = MambaSpec(
        block_size=1024,
        shapes=((3, 384), (2, 64, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        page_size_padded=full[0].page_size_bytes * 2,
    )
    wide = (FullAttentionSpec(**{**shape, "block_size": 2 * BLOCK}), ("a0", "a1"), attention("triton"), BLOCK)
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    return {
        "full": [full],
        "window+full": [window, full],
        "states+full": [(state, ("m0", "m1"), None, 1024), (state, ("m2", "m3"), None, 1024), wide],
        "latents": [(latent, ("l0", "l1"), attention("mla"), BLOCK)],
    }[kinds]


class Engine:
    """A scheduler and one worker's connector; ``memory`` gives the bytes of a block by layer."""

    def __init__(
        self, reshape: Callable[..., dict[str, Any]], model: Path, host: Kvd, kinds: str, mode: str, role: str
    ) -> None:
        from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.attention.backends.utils import set_kv_cache_layout
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from kvd.vllm.builds.recovering import recovering_scheduler
        from kvd.vllm.connector import KvdConnector

        set_kv_cache_layout("HND")
        groups = groups_of(kinds)
        self.caches, self.geometry = made(reshape, groups, blocks=POOL)
        given = transfer_config(host, f"{role}-engine", "kv_both", extra={"mode": mode, "backend": "nixl"})
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", seed=1),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=CHUNK,
                max_model_len=1024,
                is_encoder_decoder=False,
                scheduler_cls="kvd.vllm.builds.recovering.recovering_scheduler",
            ),
            cache_config=cache,
            kv_transfer_config=KVTransferConfig(**given),
        )
        cache.num_gpu_blocks = self.geometry.num_blocks
        self.config = KVCacheConfig(
            num_blocks=self.geometry.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(names), spec) for spec, names, *_ in groups],
        )
        self.scheduler: Any = recovering_scheduler(
            vllm_config=config,
            kv_cache_config=self.config,
            block_size=max(spec.block_size for spec, *_ in groups),
            hash_block_size=BLOCK,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.worker: Any = KvdConnector(config, KVConnectorRole.WORKER, self.config)
        self.worker.register_kv_caches(self.caches)
        self.role = role
        self.answers: list[Any] = []
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.noise = np.random.default_rng(7)

    def arrive(self, name: str, params: Mapping[str, Any], max_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=list(range(10, 10 + PROMPT)),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": dict(params)}
            ),
            pooling_params=None,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """One step in the order of vLLM's runner; the tokens that it computes, by request."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output, worker = self.scheduler.schedule(), self.worker
        names = list(output.num_scheduled_tokens)
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        for name, count in output.num_scheduled_tokens.items():
            self.tables[name] = self.scheduler.kv_cache_manager.get_block_ids(name)
            if self.role == "prefill":
                self._fill(name, self.scheduler.requests[name].num_computed_tokens - count)
        if names:
            worker.wait_for_save()
        sent, received = worker.get_finished(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                [] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=told,
        )
        for answers in self.scheduler.update_from_output(output, result).values():
            self.answers += answers.outputs
        return dict(output.num_scheduled_tokens)

    def page(self, layer: str, block: int) -> np.ndarray[Any, Any]:
        """The bytes of one block of a layer."""
        import ctypes

        found = self.geometry.layers[layer][1]
        region = self.geometry.regions[found.region]
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.length).from_address(region.address))
        begin = found.offset + block * found.stride
        return memory[begin : begin + found.page.size]

    def pages(self, name: str) -> dict[tuple[str, int], bytes]:
        """All that a request's blocks hold, by layer and the block's place from the end."""
        return {
            (layer.name, place - len(ids)): self.page(layer.name, block).tobytes()
            for group, ids in zip(self.geometry.groups, self.tables[name], strict=True)
            for layer in group.layers
            for place, block in enumerate(ids)
            if block
        }

    def _fill(self, name: str, computed: int) -> None:
        for group, ids in zip(self.geometry.groups, self.tables[name], strict=True):
            begin = 0 if group.kind == "mamba" else computed // group.block_size
            for layer in group.layers:
                for block in ids[begin:]:
                    if block:
                        page = self.page(layer.name, block)
                        page[:] = self.noise.integers(0, 256, len(page), np.uint8)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


Pair = tuple[Engine, Engine, tuple[Kvd, Kvd]]


@pytest.fixture(params=["pull", "push"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def pair(
    request: pytest.FixtureRequest,
    reshape: Callable[..., dict[str, Any]],
    model: Path,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pair]:
    where = Place(rank=Rank(0, 0, 0), tp=1, dcp=1, kv_heads=2)
    monkeypatch.setattr("kvd.vllm.connector.place", lambda _config: where)
    with two_hosts(tmp_path) as hosts:
        made_ = [
            Engine(reshape, model, host, request.param, mode, role)
            for host, role in zip(hosts, ("prefill", "decode"), strict=True)
        ]
        try:
            ready(*made_)
            yield made_[0], made_[1], hosts
        finally:
            for engine in made_:
                engine.close()


def handed_over(prefill: Engine, decode: Engine, hosts: tuple[Kvd, Kvd], mode: str) -> dict[str, int]:
    """Ask both for the same prompt; the tokens of the decoder's first step with it."""
    name = f"{mode}ed"
    if mode == "pull":
        prefill.arrive(name, PREFILL_PARAMS, 1)

        def prefilled() -> Any:
            prefill.step()
            return next((a for a in prefill.answers if a.request_id == name and a.finish_reason), None)

        answer = wait_for(prefilled, 30.0)
        assert answer.kv_transfer_params, "the prefiller offered nothing"
        decode.arrive(name, answer.kv_transfer_params, 2)
    else:
        endpoint = hosts[0].endpoint()
        both = {"transfer_mode": "push", "kvd_transfer_id": "x", "kvd_contract": 2}
        decode.arrive(
            name,
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": "prefill-engine",
                "remote_host": endpoint.host,
                "remote_port": endpoint.port,
                **both,
            },
            2,
        )
        prefill.arrive(name, {**PREFILL_PARAMS, **both}, 1)

    def stepped() -> dict[str, int]:
        prefill.step()
        return decode.step()

    return wait_for(stepped, 60.0)


def ready(*engines: Engine) -> None:
    """Wait until both kvds know their engine whole."""

    def known() -> bool:
        for engine in engines:
            engine.step()
        return all(e.scheduler.connector._half._session.state.engine_generation for e in engines)

    wait_for(known, 30.0)


def test_the_decoder_gets_the_prefillers_bytes(pair: Pair, mode: str) -> None:
    prefill, decode, hosts = pair
    assert handed_over(prefill, decode, hosts, mode) == {f"{mode}ed": 1}
    theirs, ours = (engine.pages(f"{mode}ed") for engine in (prefill, decode))
    both = theirs.keys() & ours.keys()
    assert {layer for layer, _ in both} == set(prefill.geometry.layers)
    assert [key for key in sorted(both) if theirs[key] != ours[key]] == []


def test_a_forced_miss_is_computed_whole(pair: Pair, mode: str) -> None:
    prefill, decode, hosts = pair
    pool = decode.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    target = NextLoads(count=1, seconds=60.0)
    hosts[1].ask(ForceMiss(engine_id="decode-engine", target=target, when="before", carry_out=True))
    assert handed_over(prefill, decode, hosts, mode) == {f"{mode}ed": CHUNK}
    wait_for(lambda: decode.step() == {} and not decode.scheduler.has_unfinished_requests(), 30.0)
    assert pool.get_num_free_blocks() == free
