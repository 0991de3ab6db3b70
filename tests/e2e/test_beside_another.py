"""A connector that saves KV stands behind ours in a MultiConnector: who loads what, and what a miss does then.

What comes of hand-overs themselves is a row of the matrix (`tests.support.configurations`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvctl.demo.deployment import Deployment, engines
from kvctl.processes.daemons import two_hosts
from tests.support import nursery
from tests.support.configurations import CONFIGURATIONS, Setup
from tests.support.configured import connector, two_specs
from tests.support.daemons import wait_for
from tests.support.deployments import PATIENT_KVD, handed_over, prompt_of
from tests.support.engine_calls import engine_metrics, reset_prefix_cache

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER = 8
LOADED = "vllm:external_prefix_cache_hits"


@pytest.fixture(scope="module", params=["pull", "push"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two engines, and one folder in which both of their ExampleConnectors save what is computed."""
    folder = tmp_path_factory.mktemp("pair")
    (row,) = [row for row in CONFIGURATIONS if row.beside == "ExampleConnector"]
    setup = Setup(row, "KvdConnector")
    with two_hosts(folder, PATIENT_KVD) as hosts, engines(nursery.start) as start:
        prefill, decode = (
            start(replace(spec, kv_transfer_config=connector(setup, role, hosts, folder)))
            for role, spec in enumerate(two_specs(row, folder))
        )
        for engine in (prefill, decode):
            engine.wait_ready(300.0)
        yield Deployment(*hosts, prefill, decode, request.param)


def alone(pair: Deployment, prompt: list[int]) -> tuple[int, ...]:
    """What the decoder computes by itself. Its ExampleConnector saves it, its own cache forgets it."""
    answer = pair.decode.submit(prompt, ANSWER).result(120)
    forget(pair)
    return answer.token_ids


def forget(pair: Deployment) -> None:
    for engine in (pair.prefill, pair.decode):
        wait_for(partial(reset_prefix_cache, engine), 60.0)


def loaded(pair: Deployment) -> int:
    """Tokens that the decoder did not compute, whichever connector brought them."""
    return int(engine_metrics(pair.decode).values[LOADED])


def force_miss(pair: Deployment, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvctl", "force-miss", *words, "-o", "json", "--runtime-dir"]
    done = subprocess.run(
        [*command, str(pair.decode_host.directory)], capture_output=True, text=True, check=True, timeout=180
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("seed", range(44, 52))
def test_what_the_prefillers_other_connector_loads_goes_to_the_decoder_too(
    pair: Deployment, seed: int
) -> None:
    prompt = prompt_of(700, seed=seed)
    expected = alone(pair, prompt)
    asked = pair.ask(prompt, ANSWER)
    assert (asked.decoded.error, asked.decoded.token_ids) == ("", expected)
    (record,) = handed_over(pair, asked.handed_over)
    assert (record.state, record.tokens) == ("done", len(prompt))


def test_after_a_miss_the_answer_is_right_and_the_next_request_is_loaded(pair: Deployment) -> None:
    prompt = prompt_of(700, seed=42)
    expected = alone(pair, prompt)
    order = force_miss(pair, "--next", "1", "--when", "flight", "--yes")
    asked = pair.ask(prompt, ANSWER)
    assert (asked.decoded.error, asked.decoded.token_ids) == ("", expected)
    (record,) = handed_over(pair, asked.handed_over)
    assert record.state == "miss"
    told = force_miss(pair, "--order", order["order_id"], "--wait", "--timeout", "120s")
    assert [one["state"] for one in told["requests"]] == ["recovered"]
    forget(pair)
    again = pair.ask(prompt, ANSWER)
    assert again.decoded.token_ids == expected
    assert handed_over(pair, again.handed_over)[0].state == "done"


def test_a_prompt_without_params_is_loaded_by_the_other_connector(pair: Deployment) -> None:
    prompt = prompt_of(700, seed=43)
    expected = alone(pair, prompt)
    before = loaded(pair)
    assert pair.decode.submit(prompt, ANSWER).result(120).token_ids == expected
    assert loaded(pair) - before == 640  # whole blocks of 128
