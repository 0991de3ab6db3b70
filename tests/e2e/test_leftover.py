"""Engines with blocks of unequal size, and not-a-numbers in every block that is loaded: answers are right all the same.

What a load leaves of its blocks a kernel may read: a mask takes it out, but zero times what is no number is no number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvctl.cli.units import Mode
from kvctl.demo.deployment import Deployment, engine_id, engines, transfer_config
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import two_hosts
from tests.support import nursery, poisoned
from tests.support.deployments import (
    HYBRID_BLOCK,
    PATIENT,
    PATIENT_KVD,
    found_out,
    handed_over,
    nothing_is_left,
    prompt_of,
)
from tests.support.tiny_models import ARGUMENTS, MODELS, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

ANSWER = 24
MODES: tuple[Mode, ...] = ("pull", "push")


@dataclass(frozen=True)
class Blocks:
    """A model, and how many tokens a block has at the prefiller and at the decoder."""

    model: str
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.model}-{self.prefill}-to-{self.decode}"


CASES = (
    Blocks("llama", 32, 128),
    Blocks("qwen3.5-gdn", HYBRID_BLOCK, 2 * HYBRID_BLOCK),
    Blocks("llama", 128, 32),
    Blocks("qwen3.5-gdn", 2 * HYBRID_BLOCK, HYBRID_BLOCK),
    Blocks("gemma3", 32, 128),
    Blocks("deepseek-v2", 16, 64),
    Blocks("granite-hybrid", 512, 1024),
)
ALWAYS = CASES[:2]
"""Those of every run, which must stay within half an hour; `make e2e-matrix` has them all."""


@dataclass(frozen=True)
class Pair:
    """Two engines, and what is found in the blocks of loads."""

    engines: Deployment
    file: Path


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case in ALWAYS else pytest.mark.matrix) for case in CASES],
    ids=str,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both engines may push, and both pull: what is asked of them says which."""
    case: Blocks = request.param
    folder = tmp_path_factory.mktemp("leftover")
    model, file = write_model(case.model, folder / "models"), folder / "found"
    with two_hosts(folder, PATIENT_KVD) as hosts, engines(nursery.start) as start:
        begun = []
        for host, role, block in zip(
            hosts, ("kv_producer", "kv_consumer"), (case.prefill, case.decode), strict=True
        ):
            config = transfer_config(host, engine_id(host), role, extra={**PATIENT, "mode": "push"})
            if role == "kv_consumer":
                config["kv_connector_module_path"] = poisoned.__name__
            spec = EngineSpec(
                model=model,
                dtype=MODELS[case.model].dtype,
                arguments=ARGUMENTS.get(case.model, {}),
                max_model_len=2048,
                block_size=block,
                enable_prefix_caching=False,
                work_dir=folder / host.name,
                log_path=folder / f"{host.name}.log",
                forced_first_tokens=role == "kv_consumer",
                kv_transfer_config=config,
                cache_dir=found_out(folder),
                env=poisoned.environment(file),
            )
            begun.append(start(spec))
        for engine in begun:
            engine.wait_ready(400.0)
        yield Pair(Deployment(*hosts, begun[0], begun[1]), file)


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_right_and_no_byte_is_what_somebody_left(pair: Pair, mode: Mode) -> None:
    both, before = pair.engines, len(poisoned.found(pair.file))
    both.mode = mode
    lengths = (20, 100, 300, 700)
    for tokens in lengths:
        prompt = prompt_of(tokens, seed=MODES.index(mode))
        alone = both.decode.submit_alone(prompt, ANSWER).result(300)

        asked = both.ask(prompt, ANSWER, timeout=300)

        assert asked.decoded.error == ""
        assert [record.state for record in handed_over(both, asked.handed_over)] == ["done"]
        assert asked.decoded.token_ids == alone.token_ids[1:]
    loads = poisoned.found(pair.file)[before:]
    assert len(loads) == len(lengths)
    assert all(load["poisoned"] > 0 for load in loads)
    assert [(load["within"], load["beyond"]) for load in loads] == [(0, 0)] * len(lengths), loads
    nothing_is_left(both)
