"""What surrounds a scheduler of vLLM's tests: two kvds, a card for its worker, and prefillers of its prompts."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.processes.daemons import Kvd
from kvd.client.session import KvdSession
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.vllm.memory.groups import GroupFacts
from kvd.wire.identity import WorkerCard
from kvd.wire.registration import RegisterWorker
from tests.support.daemons import wait_for

SECONDS = 30.0
"""How long kvd may take for anything."""
_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_numbers = itertools.count()


@dataclass
class Around:
    """What `tests.upstream.plugin` needs while tests run.

    ``utils`` is what vLLM's tests have under that name, unchanged; ``given`` what a config was made of, by its id.
    """

    model: Path
    hosts: tuple[Kvd, Kvd]
    utils: dict[str, Any]
    given: dict[int, dict[str, Any]] = field(default_factory=dict)
    prefillers: dict[str, Any] = field(default_factory=dict)
    everywhere: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    in_test: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def config(self, host: Kvd, **given: Any) -> Any:
        """A VllmConfig of theirs, with KvdConnector beside a kvd."""
        extra = {**(given.pop("kv_connector_extra_config", None) or {}), "runtime_dir": str(host.directory)}
        ours = {"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.vllm", "kv_role": "kv_both"}
        config = self.utils["create_vllm_config"](
            **{**given, **ours, "model": str(self.model), "kv_connector_extra_config": extra}
        )
        self.given[id(config)] = given
        return config

    def prefilled(self, scheduler: Any, request: Any) -> dict[str, Any]:
        """What a prefiller with caches like this scheduler's answers for a request's prompt."""
        key = repr(scheduler.kv_cache_config.kv_cache_groups)
        if key not in self.prefillers:
            self.prefillers[key] = self._prefiller_like(scheduler)
        prefiller = self.prefillers[key]
        hasher = self.utils["get_request_block_hasher"](prefiller.hash_block_size, self.utils["sha256"])
        own = self.utils["Request"](
            request_id=f"prefill-{next(_numbers)}",
            prompt_token_ids=list(request.prompt_token_ids),
            sampling_params=self.utils["SamplingParams"](max_tokens=1, ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        own.kv_transfer_params = dict(_PREFILL)
        prefiller.add_request(own)
        told = prefiller.update_from_output(
            prefiller.schedule(), self.utils["create_model_runner_output"]([own])
        )
        params = told[0].outputs[0].kv_transfer_params
        assert params, f"of {own.request_id} nothing was offered"
        return dict(params)

    def _prefiller_like(self, scheduler: Any) -> Any:
        theirs, caches = scheduler.vllm_config, scheduler.kv_cache_config
        config = self.config(self.hosts[0], **{**self.given[id(theirs)], "max_num_batched_tokens": 8192})
        config.cache_config.mamba_cache_mode = theirs.cache_config.mamba_cache_mode
        hybrid = theirs.scheduler_config.disable_hybrid_kv_cache_manager
        config.scheduler_config.disable_hybrid_kv_cache_manager = hybrid
        own = self.utils["KVCacheConfig"](
            num_blocks=10000, kv_cache_tensors=[], kv_cache_groups=caches.kv_cache_groups
        )
        made = self.utils["create_scheduler"](
            config, kv_cache_config=own, hash_block_size=scheduler.hash_block_size
        )
        present(made, self.everywhere)
        return made


def present(scheduler: Any, until: contextlib.ExitStack) -> None:
    """Register the worker of a scheduler's engine, and wait until that is whole. Both leave with ``until``."""
    half = scheduler.connector._half
    memory = encode_worker(_geometry(half.groups, scheduler.kv_cache_config))
    card = WorkerCard(
        engine=half.engine,
        rank=Rank(),
        incarnation=f"worker of {half.engine.engine_id}",
        pid=os.getpid(),
        host="test",
        backend=half.settings.backend,
        geometry=memory,
        metadata=b"nothing reads from it",
    )
    session = KvdSession(lambda: RegisterWorker(card), None, directory=half.settings.runtime_dir)
    until.callback(session.close)
    until.callback(scheduler.shutdown)
    wait_for(lambda: half._session.state.engine_generation, SECONDS)


def answered(scheduler: Any, request: Any) -> None:
    """Wait until a request's claim is held: the next step may load."""
    claims = scheduler.connector._half._claims
    claim = claims.get(request.request_id)

    def settled() -> bool:
        claims.advance(claim, time.monotonic())
        return not claim.pending

    wait_for(settled, SECONDS)
    assert claim.cause is None, claim.cause


def _geometry(groups: tuple[GroupFacts, ...], caches: Any) -> WorkerGeometry:
    """Pages of one head of a float32 for each token; states of as many bytes."""
    blocks, made, at = caches.num_blocks, [], 0
    for index, (facts, group) in enumerate(zip(groups, caches.kv_cache_groups, strict=True)):
        tokens = facts.block_size
        axes = (Axis("head", 0, 1, 1, 4 * tokens), Axis("token", 0, tokens, 1, 4))
        page = Page(4 * tokens, (Field("k", "float32", 4, 0, axes, (("head", 1), ("token", tokens))),))
        layers = []
        for name in group.layer_names:
            layers.append(Layer(name, page, region=0, offset=at, stride=page.size))
            at += page.size * blocks
        made.append(Group(index, facts.kind, tokens, tuple(layers), facts.window, facts.scratch_blocks))
    return WorkerGeometry(Rank(), blocks, (Region(1 << 20, at),), tuple(made))
