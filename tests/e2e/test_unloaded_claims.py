"""Claims that vLLM loads nothing of: its own scheduler, stepped by hand, with our connector alone and beside another.

No engine and no model that runs; kvd is one that says yes to everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvd.vllm.params import finished_prefill
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import EngineCard
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from tests.support.rigs.bench import GENERATION, KEY, Script, facts, prefill, prompt
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

PROMPT = 100
TOKENS = list(range(10, 10 + PROMPT))
BLOCK = 16
POOL = 100
OURS = {"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.vllm", "kv_role": "kv_both"}
ANOTHER = {
    "kv_connector": "ClaimingConnector",
    "kv_connector_module_path": "tests.support.claiming_connector",
    "kv_role": "kv_both",
}
PREFILLER = PeerReady(
    local_engine="d",
    peer=EngineCard(engine=facts("p"), generation=GENERATION, workers=(), digest_key=KEY),
)


class Willing(Script):
    """A kvd that knows every peer and every lease; while ``silent`` it says nothing of leases."""

    silent = False

    def call(self, message: Message, timeout: float) -> Future[Message]:
        future = super().call(message, timeout)
        if isinstance(message, GetPeer):
            future.set_result(PREFILLER)
        elif isinstance(message, LeaseClaim) and not self.silent:
            future.set_result(LeaseClaimed(request_id=message.key.request_id, seconds=20.0))
        return future

    @property
    def releases(self) -> list[str]:
        return [release.result for release in self.told(LeaseRelease)]


class Bench:
    """A scheduler; nothing computes, every request that is scheduled says 7."""

    def __init__(self, model: Path, connector: dict[str, Any]) -> None:
        from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", seed=1),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, is_encoder_decoder=False
            ),
            cache_config=cache,
            kv_transfer_config=KVTransferConfig(
                engine_id="d", kv_load_failure_policy="recompute", **connector
            ),
        )
        cache.num_gpu_blocks = POOL
        groups = [KVCacheGroupSpec(["layer0"], _attention())]
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=POOL, kv_cache_tensors=[], kv_cache_groups=groups),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )

    def arrive(self, name: str, params: dict[str, Any] | None, **sampling: Any) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        extra = {"kv_transfer_params": params} if params else {}
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(TOKENS),
                sampling_params=SamplingParams(max_tokens=5, ignore_eos=True, extra_args=extra, **sampling),
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK, sha256),
            )
        )

    def step(self) -> tuple[dict[str, int], Any]:
        """One step: the tokens that it computes by request, and what it tells the workers."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, result)
        return dict(output.num_scheduled_tokens), output.kv_connector_metadata

    def run_out(self) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_unfinished_requests():
            self.step()


def _attention() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)


def pulled(tokens: int = PROMPT) -> dict[str, Any]:
    blocks = tuple(range(1, 1 + -(-tokens // BLOCK)))
    digest = prompt(TOKENS[:tokens]).digest(KEY, tokens)
    return finished_prefill(prefill((blocks,), tokens=tokens, digest=digest), tp=1, pp=1, dcp=1)


def pushed() -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": "push",
        "kvd_transfer_id": "x",
        "remote_engine_id": "p",
        "remote_host": "h",
        "remote_port": 7,
        "kvd_contract": pulled()["kvd_contract"],
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="needs vLLM")
    return write_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def kvd(monkeypatch: pytest.MonkeyPatch) -> Willing:
    script = Willing()
    monkeypatch.setattr("kvd.vllm.connector.KvdSession", lambda card, push, **_: script.open(card, push))
    return script


Open = Callable[..., Bench]


@pytest.fixture
def opened(model: Path, kvd: Willing) -> Iterator[Open]:
    """Schedulers with our connector, or with a MultiConnector of several."""
    made: list[Bench] = []

    def open_(*connectors: dict[str, Any]) -> Bench:
        several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        several["kv_connector_extra_config"] = {"connectors": list(connectors)}  # type: ignore[assignment]
        made.append(Bench(model, several if len(connectors) > 1 else connectors[0]))
        kvd.push(PREFILLER)  # as kvd does ahead of requests
        return made[-1]

    assert kvd.releases == []
    yield open_
    for bench in made:
        bench.scheduler.shutdown()


def loads(metadata: Any) -> list[str]:
    """The requests that a step has our workers load."""
    ours = getattr(metadata, "metadata", (metadata,))
    return [order.request_id for one in ours if hasattr(one, "orders") for order in one.orders.loads]


@pytest.mark.parametrize("wish", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=str)
@pytest.mark.parametrize("silent", [False, True], ids=["answered", "unanswered"])
def test_a_request_that_wants_every_position_computed_lets_the_prefill_go(
    opened: Open, kvd: Willing, wish: dict[str, Any], silent: bool
) -> None:
    kvd.silent = silent
    bench = opened(OURS)
    bench.arrive("r", pulled(), **wish)
    computed, metadata = bench.step()
    assert (computed, loads(metadata)) == ({"r": PROMPT}, [])
    assert kvd.releases == ["done"]
    bench.run_out()
    assert (kvd.releases, len(kvd.asked(LeaseClaim))) == (["done"], 1)


def test_a_push_of_such_a_request_is_declined(opened: Open) -> None:
    bench = opened({**OURS, "kv_connector_extra_config": {"mode": "push"}})
    bench.arrive("r", pushed(), prompt_logprobs=1)
    computed, metadata = bench.step()
    assert computed == {"r": PROMPT}
    assert [name for name, _ in metadata.orders.declined] == ["x"]


def test_a_prompt_that_is_cached_here_lets_the_prefill_go(opened: Open, kvd: Willing) -> None:
    bench = opened(OURS)
    bench.arrive("before", None)
    bench.run_out()
    bench.arrive("r", pulled(PROMPT // BLOCK * BLOCK))
    computed, metadata = bench.step()
    assert (computed, loads(metadata)) == ({"r": PROMPT % BLOCK}, [])
    assert kvd.releases == ["done"]


def test_a_prompt_of_which_a_part_is_cached_here_loads_the_rest(opened: Open, kvd: Willing) -> None:
    bench = opened(OURS)
    bench.arrive("before", None)
    bench.run_out()
    bench.arrive("r", pulled())
    assert loads(bench.step()[1]) == ["r"]
    assert kvd.releases == []


def test_what_another_connector_loads_is_let_go(opened: Open, kvd: Willing) -> None:
    bench = opened(ANOTHER, OURS)
    bench.arrive("r", pulled())
    computed, metadata = bench.step()
    assert (computed, loads(metadata)) == ({}, [])
    assert bench.scheduler.requests["r"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert kvd.releases == ["done"]


def test_what_another_connector_loads_is_declined_where_it_is_pushed(opened: Open) -> None:
    bench = opened(ANOTHER, {**OURS, "kv_connector_extra_config": {"mode": "push"}})
    bench.arrive("r", pushed())
    _, metadata = bench.step()
    assert [name for name, _ in metadata.metadata[1].orders.declined] == ["x"]


def test_of_two_connectors_ours_loads_where_it_comes_first(opened: Open, kvd: Willing) -> None:
    bench = opened(OURS, ANOTHER)
    bench.arrive("r", pulled())
    assert loads(bench.step()[1]) == ["r"]
    assert kvd.releases == []


def test_a_request_that_is_aborted_before_its_turn_lets_the_prefill_go(opened: Open, kvd: Willing) -> None:
    from vllm.v1.request import RequestStatus

    kvd.silent = True
    bench = opened(OURS)
    bench.arrive("r", pulled())
    bench.step()
    assert kvd.releases == []
    bench.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert kvd.releases == ["aborted"]


def test_a_request_that_is_preempted_claims_nothing_anew(opened: Open, kvd: Willing) -> None:
    bench = opened(OURS)
    bench.arrive("r", pulled(), prompt_logprobs=1)
    bench.step()
    request = bench.scheduler.requests["r"]
    bench.scheduler.running.remove(request)
    bench.scheduler._preempt_request(request, 0.0)
    bench.run_out()
    assert (kvd.releases, len(kvd.asked(LeaseClaim))) == (["done"], 1)
