"""Our scheduler on the vLLM that is installed: vLLM's own classes, no engine, no model that runs.

`make e2e-builds` runs it on the versions that need that scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvd.vllm.builds.probe import probe
from tests.support.tiny_models import write_model
from tests.support.vllm_builds import lacks

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]

PROMPT = 100
BLOCK = 16
POOL = 100
KINDS = (("full",), ("window",), ("full", "window"), ("full", "mamba"), ("mamba", "mamba", "full"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if probe().takes_failed_requests.holds:
        lacks("need of this scheduler: its own takes failed requests", last="0.29")
    return write_model("llama", tmp_path_factory.mktemp("models"))


class Bench:
    """A scheduler that is stepped by hand; nothing computes, every request that is scheduled says 7."""

    def __init__(self, model: Path, kinds: Sequence[str], policy: str, *, asynchronous: bool) -> None:
        from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from kvd.vllm.builds.recovering import recovering_scheduler

        groups = [KVCacheGroupSpec([f"layer{i}"], spec(kind)) for i, kind in enumerate(kinds)]
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching="mamba" not in kinds)
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", seed=1),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, is_encoder_decoder=False
            ),
            cache_config=cache,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ClaimingConnector",
                kv_connector_module_path="tests.support.claiming_connector",
                kv_role="kv_both",
                kv_load_failure_policy=policy,
            ),
        )
        cache.num_gpu_blocks = POOL
        config.scheduler_config.async_scheduling = asynchronous  # which CPUs turn off
        self.scheduler: Any = recovering_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=POOL, kv_cache_tensors=[], kv_cache_groups=groups),
            block_size=max(group.kv_cache_spec.block_size for group in groups),
            hash_block_size=BLOCK,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.free = self.blocks()

    def blocks(self) -> int:
        """Free blocks."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def arrive(self, name: str, first: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(first, first + PROMPT)),
            sampling_params=SamplingParams(max_tokens=3, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def update(self, output: Any, **told: Any) -> list[Any]:
        """The step's end, with what workers tell of transfers; the answers that come of it."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(**told) if told else None,
        )
        found = self.scheduler.update_from_output(output, result)
        return [answer for answers in found.values() for answer in answers.outputs]

    def run_out(self) -> Iterator[dict[str, int]]:
        """Step until nothing is left; the tokens that each step computes, of steps that do."""
        while self.scheduler.has_requests():
            output = self.scheduler.schedule()
            if output.num_scheduled_tokens:
                yield dict(output.num_scheduled_tokens)
            self.update(output)
        self.scheduler.schedule()


def spec(kind: str) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    heads = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    match kind:
        case "full":
            return FullAttentionSpec(**heads)
        case "window":
            return SlidingWindowSpec(**heads, sliding_window=32)
        case _:
            shapes, types = ((2, 2), (4, 4)), (torch.float32, torch.float32)
            return MambaSpec(block_size=1024, shapes=shapes, dtypes=types, page_size_padded=2048)


@pytest.fixture(params=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "asynchronous")


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_what_did_not_come_is_computed(model: Path, kinds: Sequence[str], asynchronous: bool) -> None:
    bench = Bench(model, kinds, "recompute", asynchronous=asynchronous)
    lost, whole = bench.arrive("lost", 10), bench.arrive("whole", 200)
    bench.update(bench.scheduler.schedule())
    blocks = [block for group in bench.scheduler.connector.tables["lost"] for block in group if block]
    assert lost.status == whole.status
    assert lost.status.name == "WAITING_FOR_REMOTE_KVS"
    bad = set(blocks) if kinds == ("full",) else {blocks[-1]}
    bench.update(bench.scheduler.schedule(), finished_recving={"lost", "whole"}, invalid_block_ids=bad)
    first = next(steps := bench.run_out())
    assert first == {"lost": PROMPT, "whole": 1}
    assert all(step in ({"lost": 1, "whole": 1}, {"lost": 1}) for step in steps)
    assert [list(r.output_token_ids) for r in (lost, whole)] == [[7, 7, 7]] * 2
    assert bench.blocks() == bench.free


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_with_policy_fail_the_request_ends(model: Path, kinds: Sequence[str], asynchronous: bool) -> None:
    bench = Bench(model, kinds, "fail", asynchronous=asynchronous)
    bench.arrive("lost", 10)
    bench.update(bench.scheduler.schedule())
    blocks = [block for group in bench.scheduler.connector.tables["lost"] for block in group if block]
    told = {"finished_recving": {"lost"}, "invalid_block_ids": {blocks[-1]}}
    answers = bench.update(bench.scheduler.schedule(), **told)
    assert [(a.request_id, a.finish_reason.name) for a in answers] == [("lost", "ERROR")]
    assert list(bench.run_out()) == []
    assert bench.blocks() == bench.free


@pytest.mark.parametrize("kinds", KINDS[1:], ids="+".join)
def test_one_worker_fails_and_another_is_not_done(
    model: Path, kinds: Sequence[str], asynchronous: bool
) -> None:
    """Blocks stay the load's until all workers are done: bytes may still land there."""
    bench = Bench(model, kinds, "recompute", asynchronous=asynchronous)
    lost = bench.arrive("lost", 10)
    bench.update(bench.scheduler.schedule())
    blocks = [block for group in bench.scheduler.connector.tables["lost"] for block in group if block]
    held = bench.blocks()
    bench.update(bench.scheduler.schedule(), invalid_block_ids={blocks[0]})
    bench.update(bench.scheduler.schedule())
    assert lost.status.name == "WAITING_FOR_REMOTE_KVS"
    assert bench.blocks() == held
    bench.update(bench.scheduler.schedule(), finished_recving={"lost"})
    assert next(bench.run_out()) == {"lost": PROMPT}
