"""Different tensor-parallel sizes on the two sides: heads, channels and windows are resharded on the way.

Every byte is compared: the decoder adds up what it loaded, and it is what the prefiller had. Answers are compared as
far as rounding lets them be. Two workers add up in another order than one, which in bfloat16 is another sum, and
sometimes another token: there what is right is what the same hand-over gives again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from kvctl.demo.deployment import Deployment
from tests.support.daemons import wait_for
from tests.support.deployments import prompt_of, running, transfers_of
from tests.support.engine_calls import reset_prefix_cache
from tests.support.matrix import UNEQUAL, Cell

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ANSWER = 12
ALWAYS = (Cell("llama", True, "nixl", "pull", (1, 2)),)
"""The pair of every run, which must stay within half an hour; `make e2e-matrix` has them all."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(cell, marks=() if cell in ALWAYS else pytest.mark.matrix) for cell in UNEQUAL],
    ids=str,
)
def resharded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    cell: Cell = request.param
    with running(
        cell.model, tmp_path_factory.mktemp("tp"), tp=cell.tp, extra={"kv_checksum": "all"}
    ) as deployment:
        yield deployment


def test_every_byte_arrives_and_the_output_is_what_the_decoder_computes_alone(resharded: Deployment) -> None:
    ranks = resharded.decode.spec.tensor_parallel_size
    exact = resharded.decode.spec.dtype == "float32"
    for tokens in (100, 700):
        prompt = prompt_of(tokens, seed=ranks)
        if exact:
            right = resharded.decode.submit_alone(prompt, ANSWER).result(300).token_ids[1:]
        else:
            right = resharded.ask(prompt, ANSWER, timeout=300).decoded.token_ids
        for engine in (resharded.prefill, resharded.decode):
            wait_for(partial(reset_prefix_cache, engine), 60.0)

        asked = resharded.ask(prompt, ANSWER, timeout=300)

        assert asked.decoded.error == ""
        assert asked.decoded.token_ids == right
        records = transfers_of(resharded, asked.prefilled, ranks)
        assert [(record.state, record.checksum.state) for record in records] == [("done", "ok")] * ranks
        assert all(group.layers for record in records for group in record.checksum.groups)
        assert len({record.local_rank for record in records}) == ranks
        assert {rank for record in records for rank in record.remote_ranks} == {
            f"tp{rank}" for rank in range(resharded.prefill.spec.tensor_parallel_size)
        }
