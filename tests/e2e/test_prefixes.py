"""Prefixes that any engine holds, read by others: what is computed, what is moved, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.deployments import prompt_of
from tests.support.engine_calls import reset_prefix_cache
from tests.support.sharing import Sharing, sharing
from tests.support.tiny_models import MODELS

pytestmark = pytest.mark.e2e

BLOCK, ANSWER = 128, 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    with sharing("llama", tmp_path_factory.mktemp("prefixes")) as running:
        yield running


def page_bytes() -> int:
    config = MODELS["llama"].config
    bytes_of_layer: int = BLOCK * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    return bytes_of_layer * int(config["num_hidden_layers"])


def test_an_engine_computes_of_a_prompt_what_nobody_holds(llama: Sharing) -> None:
    """Four engines, each of which continues what the one before it answered."""
    prompt = prompt_of(300)
    held, before = 0, ""
    for name in ("a", "b", "c", "d"):
        answered = llama.engines[name].submit(prompt, ANSWER).result(120)
        assert answered.error == ""
        assert answered.num_cached_tokens == held
        if before:
            assert llama.last_read(name, before).bytes == held // BLOCK * page_bytes()
        # Of its last token nothing is computed.
        held = (len(prompt) + ANSWER - 1) // BLOCK * BLOCK
        prompt, before = [*prompt, *answered.token_ids, *prompt_of(250, seed=ord(name))], name
    # What all of them answered is what one of them computes alone.
    assert all(reset_prefix_cache(engine) for engine in llama.engines.values())
    alone = llama.engines["a"].submit(prompt[: -250 - ANSWER], ANSWER).result(120)
    assert alone.num_cached_tokens == 0
    assert list(alone.token_ids) == prompt[-250 - ANSWER : -250]
