"""Checksums between two real engines: everything is compared and right, and what was overwritten is not used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvctl.cli.units import Mode
from kvctl.demo.deployment import Deployment, engine_id, engines, transfer_config
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd, two_hosts
from tests.support import nursery, overwriting_prefiller
from tests.support.daemons import wait_for
from tests.support.deployments import HYBRID_BLOCK, PATIENT, counter, found_out, handed_over, prompt_of
from tests.support.engine_calls import reset_prefix_cache
from tests.support.tiny_models import MODELS, NO_PREFIX_CACHING, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ANSWER = 8
CHUNKS = {"llama": 256, "qwen3.5-gdn": HYBRID_BLOCK}
CELLS: tuple[tuple[str, Mode, str], ...] = (
    ("llama", "pull", "nixl"),
    ("llama", "push", "nixl"),
    ("qwen3.5-gdn", "pull", "direct"),
    ("qwen3.5-gdn", "push", "nixl"),
)
ALWAYS = (CELLS[0], CELLS[3])
"""Those that are part of every run."""


@dataclass(frozen=True)
class Pair:
    engines: Deployment
    overwrite: Path

    def alone(self, prompt: list[int]) -> tuple[int, ...]:
        """What the decoder computes by itself in the pieces of a hand-over."""
        answer = self.engines.decode.submit_alone(prompt, ANSWER).result(300).token_ids[1:]
        self.forget()
        return answer

    def forget(self) -> None:
        for engine in (self.engines.prefill, self.engines.decode):
            wait_for(partial(reset_prefix_cache, engine), 60.0)


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=() if c in ALWAYS else pytest.mark.matrix) for c in CELLS],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model, mode, backend = request.param
    folder = tmp_path_factory.mktemp("checksums")
    faults = folder / "faults"
    faults.mkdir()
    path = write_model(model, folder / "models")
    extra = {"backend": backend, "mode": mode, "kv_checksum": "all", **PATIENT}

    def spec(host: Kvd, role: str) -> EngineSpec:
        return EngineSpec(
            model=path,
            dtype=MODELS[model].dtype,
            max_model_len=2048,
            max_num_batched_tokens=CHUNKS[model],
            enable_prefix_caching=model not in NO_PREFIX_CACHING,
            cache_dir=found_out(folder),
            work_dir=folder / host.name,
            log_path=folder / f"{host.name}.log",
            forced_first_tokens=role == "kv_consumer",
            env=overwriting_prefiller.environment(faults),
            kv_transfer_config={
                **transfer_config(host, engine_id(host), role, extra=extra),
                "kv_connector_module_path": overwriting_prefiller.__name__,
            },
        )

    with two_hosts(folder) as hosts, engines(nursery.start) as start:
        specs = [spec(host, role) for host, role in zip(hosts, ("kv_producer", "kv_consumer"), strict=True)]
        prefill, decode = (start(one) for one in specs)
        for engine in (prefill, decode):
            engine.wait_ready(300)
        yield Pair(Deployment(*hosts, prefill, decode, mode), faults / "overwrite")


@pytest.mark.parametrize("tokens", [100, 700, 1500])
def test_all_that_is_handed_over_is_compared_and_equal(pair: Pair, tokens: int) -> None:
    prompt = prompt_of(tokens, seed=tokens)
    right = pair.alone(prompt)
    asked = pair.engines.ask(prompt, ANSWER, timeout=300)
    assert (asked.prefilled.error, asked.decoded.error) == ("", "")
    assert asked.decoded.token_ids == right
    record = handed_over(pair.engines, asked.handed_over)[0]
    assert (record.state, record.cause) == ("done", "")
    assert record.checksum.why == ""
    assert record.checksum.state == "ok"
    compared = {group.group: group.layers for group in record.checksum.groups}
    assert compared.keys() == {group.group for group in record.groups}
    assert all(compared.values())
    pair.forget()


def test_what_was_overwritten_before_it_was_read_is_computed_here(pair: Pair) -> None:
    if pair.engines.mode == "push":
        pytest.skip("a push has sent its layers before the prompt is added up: nothing is left to overwrite")
    prompt = prompt_of(900, seed=9)
    right = pair.engines.decode.submit(prompt, ANSWER).result(300).token_ids
    pair.forget()
    before = counter(pair.engines.decode_host, "checksums.differs")
    pair.overwrite.touch()
    try:
        asked = pair.engines.ask(prompt, ANSWER, timeout=300)
    finally:
        pair.overwrite.unlink()
    assert (asked.prefilled.error, asked.decoded.error) == ("", "")
    assert asked.decoded.token_ids == right
    (record,) = handed_over(pair.engines, asked.handed_over)
    assert (record.state, record.code) == ("miss", "CHECKSUM_MISMATCH")
    assert record.checksum.state == "differs"
    assert counter(pair.engines.decode_host, "checksums.differs") == before + 1
    pair.forget()
