"""Prefixes between engines with one worker and with two: each worker reads its heads of what the other engine holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import wait_for
from tests.support.deployments import prompt_of
from tests.support.forgetting import forget_prefixes
from tests.support.sharing import Sharing, sharing
from tests.support.tiny_models import MODELS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(900)]

BLOCK, ANSWER = 128, 8
WORKERS = {"one": 1, "two": 2}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    with sharing(
        "llama",
        tmp_path_factory.mktemp("tp"),
        names=(("one",), ("two",)),
        own={name: {"tensor_parallel_size": workers} for name, workers in WORKERS.items()},
    ) as running:
        yield running


@pytest.mark.parametrize(("holder", "reader"), [("one", "two"), ("two", "one")])
def test_a_prefix_is_read_whatever_the_number_of_workers(engines: Sharing, holder: str, reader: str) -> None:
    prompt = prompt_of(5 * BLOCK + 60, seed=WORKERS[reader])
    alone = engines.engines[reader].submit(prompt, ANSWER).result(300)
    assert (alone.error, alone.num_cached_tokens) == ("", 0)
    forget_prefixes(engines.engines[reader])
    assert engines.engines[holder].submit(prompt, 1).result(300).error == ""
    engines.settle()

    answered = engines.engines[reader].submit(prompt, ANSWER).result(300)

    assert (answered.error, answered.token_ids) == ("", alone.token_ids)
    assert answered.num_cached_tokens == 5 * BLOCK, "the rest is computed"
    workers = WORKERS[reader]
    reads = wait_for(lambda: found if len(found := engines.read(reader, holder)) >= workers else None, 60.0)
    assert sorted(read.local_rank for read in reads) == [f"tp{rank}" for rank in range(workers)]
    assert {read.state for read in reads} == {"done"}
    # Each worker has its share of the heads.
    config = MODELS["llama"].config
    token = 2 * config["num_key_value_heads"] * config["head_dim"] * 4 * config["num_hidden_layers"]
    assert [read.bytes for read in reads] == [5 * BLOCK * token // workers] * workers
    assert {rank for read in reads for rank in read.remote_ranks} == {
        f"tp{rank}" for rank in range(WORKERS[holder])
    }
    forget_prefixes(*engines.engines.values())
