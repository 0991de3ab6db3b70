"""Loads so large that two threads read them, between two real engines: outputs, and that there are two lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.demo.deployment import Deployment
from kvd.backends.split_lane import LEAST_BYTES
from tests.support.deployments import prompt_of, running, transfers_of
from tests.support.engine_pids import engine_pids
from tests.support.forgetting import forget_prefixes
from tests.support.tiny_models import MODELS

pytestmark = pytest.mark.e2e

ANSWER = 16
TOKENS = 1000
WIDE = "llama-wide"
"""The tiny Llama with 32 KiB of KV for each token."""
SHAPE = {"num_hidden_layers": 8, "num_key_value_heads": 8, "head_dim": 64}


@pytest.fixture(scope="module", params=[pytest.param("direct", marks=pytest.mark.matrix), "nixl"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    tiny = MODELS["llama"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, WIDE, dataclasses.replace(tiny, name=WIDE, config=tiny.config | SHAPE))
        folder = tmp_path_factory.mktemp(request.param)
        backend = {"backend": request.param}
        with running(WIDE, folder, extra=backend, kv_cache_memory_bytes=160 << 20) as deployment:
            yield deployment


def mappings(deployment: Deployment) -> list[int]:
    """How many times each of the decoder's processes has mapped the prefiller's KV memory."""

    def memfds(pid: int) -> list[str]:
        lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        return [line[4] for line in lines if len(line) > 5 and line[5].startswith("/memfd:kvd-kv")]

    source = {inode for pid in engine_pids(deployment.prefill).all for inode in memfds(pid)}
    return [sum(inode in source for inode in memfds(pid)) for pid in engine_pids(deployment.decode).all]


def test_a_large_load_gives_the_answer_of_one_engine_alone(engines: Deployment) -> None:
    for seed in range(4):  # the first connect, and open the second lane
        prompt = prompt_of(TOKENS, seed)
        alone = engines.decode.submit(prompt, ANSWER).result(120)
        forget_prefixes(engines.decode)

        asked = engines.ask(prompt, ANSWER)

        assert asked.decoded.error == ""
        assert asked.decoded.token_ids == alone.token_ids
        (record,) = transfers_of(engines, asked.prefilled)
        assert (record.state, record.tokens) == ("done", TOKENS)
        assert record.bytes > 3 * LEAST_BYTES
        forget_prefixes(engines.decode)
    if record.backend == "direct":
        assert max(mappings(engines)) == 2
