"""A given-up load whose bytes come late: they land nowhere. Without the guard they land in another request's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment, engine_id, engines, transfer_config
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import two_hosts
from tests.support import nursery
from tests.support.daemons import ROOT, wait_for
from tests.support.deployments import PATIENT, found_out, leased, prompt_of, transfers_of
from tests.support.engine_pids import engine_pids
from tests.support.halting import halted
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.recovery_matrix, pytest.mark.timeout(600)]

ANSWER = 8
TOKENS = 1100
BLOCKS = 12
"""Of 128 tokens, one of them reserved: two prompts of nine blocks cannot both stay."""
BLOCK_BYTES = 128 * 3 * 2 * 4 * 32 * 4


@dataclass(frozen=True)
class Pair:
    """Two engines with hardly any memory; while ``unguarded`` exists the decoder's lanes live on."""

    engines: Deployment
    unguarded: Path


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("late")
    model, file = write_model("llama", folder / "models"), folder / "unguarded"
    settings = {**PATIENT, "load_timeout": 4.0, "lease_seconds": 60.0, "backend": request.param}
    with two_hosts(folder) as hosts, engines(nursery.start) as start:
        begun = []
        for host, role in zip(hosts, ("kv_producer", "kv_consumer"), strict=True):
            config = transfer_config(host, engine_id(host), role, extra=settings)
            if role == "kv_consumer":
                config["kv_connector_module_path"] = "tests.support.unguarded"
            spec = EngineSpec(
                model=model,
                work_dir=folder / host.name,
                log_path=folder / f"{host.name}.log",
                max_model_len=10 * 128,
                kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES,
                kv_transfer_config=config,
                cache_dir=found_out(folder),
                env={"UCX_TLS": "tcp,self", "TEST_UNGUARDED": str(file), "PYTHONPATH": str(ROOT)},
            )
            begun.append(start(spec))
        for engine in begun:
            engine.wait_ready(400.0)
        yield Pair(Deployment(*hosts, begun[0], begun[1], "pull"), file)


def given_up(pair: Pair, seed: int) -> tuple[list[int], tuple[int, ...]]:
    """Give a load up while the prefiller stands still, have another prompt computed in its blocks, and let it go on.

    That prompt, and its answer.
    """
    both = pair.engines
    prompt, other = (prompt_of(TOKENS, seed=seed + n) for n in range(2))
    # A lane to this prefiller that works: Mooncake makes none to one that is stopped, and nothing would be posted.
    both.ask(prompt_of(100, seed=seed + 2), ANSWER)
    prefilled = both.prefill.submit(prompt, 1, PREFILL_PARAMS).result(120)
    leased(both)
    with halted(engine_pids(both.prefill).executing):
        decoded = both.decode.submit(prompt, ANSWER, prefilled.kv_transfer_params).result(120)
        assert decoded.error == ""
        missed = transfers_of(both, prefilled)[0]
        assert (missed.state, "posted" in missed.moments) == ("miss", True)
        assert "not complete within" in missed.cause
        answer = both.decode.submit(other, ANSWER).result(120).token_ids
        again = both.decode.submit(other, ANSWER).result(120)
        assert (again.token_ids, (again.num_cached_tokens or 0) > 0) == (answer, True)
    return other, answer


def test_late_bytes_land_nowhere(pair: Pair) -> None:
    both = pair.engines
    other, answer = given_up(pair, 10)
    both.prefill.submit(prompt_of(200, seed=2), 4).result(120)  # the prefiller is at work again
    for _ in range(5):
        assert both.decode.submit(other, ANSWER).result(120).token_ids == answer


def test_without_the_guard_they_land_in_another_requests_blocks(pair: Pair) -> None:
    """The same, with lanes that live on: else the test above would show nothing."""
    pair.unguarded.touch()
    other, answer = given_up(pair, 20)
    wait_for(lambda: pair.engines.decode.submit(other, ANSWER).result(120).token_ids != answer, 60.0)
