"""Engines whose peers read a copy of their memory: NIXL and Mooncake between mirrors, right answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.deployment import Deployment
from tests.support.deployments import HYBRID_BLOCK, handed_over, nothing_is_left, prompt_of, running
from tests.support.forgetting import forget_prefixes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER = 8
CHUNK = HYBRID_BLOCK


def deployed(model: str, mode: Any, engine: str, folder: Path) -> Any:
    extra = {"backend": "staged", "backend_options": {"engine": engine}, "mode": mode}
    return running(model, folder, mode=mode, extra=extra, prefill={"max_num_batched_tokens": CHUNK})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3.5-gdn", "push", "nixl"), id="gdn-push-nixl"),
        pytest.param(("qwen3.5-gdn", "pull", "nixl"), id="gdn-pull-nixl", marks=pytest.mark.matrix),
        pytest.param(("gemma3", "pull", "nixl"), id="gemma3-pull-nixl", marks=pytest.mark.matrix),
        pytest.param(("llama", "pull", "mooncake"), id="llama-pull-mooncake", marks=pytest.mark.matrix),
        pytest.param(("llama", "push", "mooncake"), id="llama-push-mooncake", marks=pytest.mark.matrix),
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    model, mode, engine = request.param
    with deployed(model, mode, engine, tmp_path_factory.mktemp("staged")) as deployment:
        yield deployment


@pytest.mark.parametrize("tokens", [100, 1500])
def test_the_decoder_goes_on_where_the_prefiller_ended(pair: Deployment, tokens: int) -> None:
    prompt = prompt_of(tokens)
    alone = pair.decode.submit_alone(prompt, ANSWER).result(200)
    forget_prefixes(pair.decode)

    asked = pair.ask(prompt, ANSWER, timeout=300)

    assert (asked.prefilled.error, asked.decoded.error) == ("", "")
    (record,) = handed_over(pair, asked.handed_over)
    assert (record.state, record.cause, record.backend, record.mode) == ("done", "", "staged", pair.mode)
    assert asked.decoded.token_ids == alone.token_ids[1:]


def test_a_prompt_that_the_prefiller_has_cached_is_handed_over_again(pair: Deployment) -> None:
    prompt = prompt_of(900, seed=3)
    alone = pair.decode.submit_alone(prompt, ANSWER).result(200)
    for _ in range(2):
        forget_prefixes(pair.decode)
        asked = pair.ask(prompt, ANSWER, timeout=300)
        assert asked.decoded.token_ids == alone.token_ids[1:]
        (record,) = handed_over(pair, asked.handed_over)
        assert record.state == "done"
    nothing_is_left(pair)
