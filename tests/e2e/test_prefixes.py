"""Prefixes that any engine holds, read by others: what is computed, what is moved, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS
from tests.support.deployments import HYBRID_BLOCK, prompt_of
from tests.support.forgetting import forget_prefixes
from tests.support.sharing import Sharing, sharing
from tests.support.tiny_models import MODELS

pytestmark = pytest.mark.e2e

BLOCK, ANSWER = 128, 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    with sharing("llama", tmp_path_factory.mktemp("prefixes")) as running:
        yield running


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    with sharing(
        "qwen3.5-gdn",
        tmp_path_factory.mktemp("gdn"),
        names=(("a",), ("c",)),
        max_num_batched_tokens=HYBRID_BLOCK,
        max_num_seqs=1,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    with sharing("gemma3", tmp_path_factory.mktemp("gemma")) as running:
        yield running


def layer_bytes(model: str) -> int:
    """Bytes of a block in one layer of attention."""
    config = MODELS[model].config
    return int(BLOCK * 2 * config["num_key_value_heads"] * config["head_dim"] * 4)


def page_bytes() -> int:
    return layer_bytes("llama") * int(MODELS["llama"].config["num_hidden_layers"])


def test_an_engine_computes_of_a_prompt_what_nobody_holds(llama: Sharing) -> None:
    """Four engines, each of which continues what the one before it answered."""
    prompt = prompt_of(300)
    held, before = 0, ""
    for name in ("a", "b", "c", "d"):
        llama.settle()
        answered = llama.engines[name].submit(prompt, ANSWER).result(120)
        assert answered.error == ""
        assert answered.num_cached_tokens == held
        if before:
            assert llama.last_read(name, before).bytes == held // BLOCK * page_bytes()
        # Of its last token nothing is computed.
        held = (len(prompt) + ANSWER - 1) // BLOCK * BLOCK
        prompt, before = [*prompt, *answered.token_ids, *prompt_of(250, seed=ord(name))], name
    # What all of them answered is what one of them computes alone.
    forget_prefixes(*llama.engines.values())
    alone = llama.engines["a"].submit(prompt[: -250 - ANSWER], ANSWER).result(120)
    assert alone.num_cached_tokens == 0
    assert list(alone.token_ids) == prompt[-250 - ANSWER : -250]


def test_the_next_turn_finds_at_the_prefiller_what_the_decoder_answered(llama: Sharing) -> None:
    """A router that prefills on one engine and decodes on another, turn after turn."""
    prefiller, decoder = llama.engines["b"], llama.engines["c"]
    prompt = prompt_of(2 * BLOCK - 6, seed=50)
    for turn in range(2):
        llama.settle()
        prefilled = prefiller.submit(prompt, 1, PREFILL_PARAMS).result(120)
        params = dict(prefilled.kv_transfer_params or {})
        params.pop("remote_prefill_cached_tokens", None)
        decoded = decoder.submit(prompt, ANSWER, params).result(120)
        # The second block of the first turn was full on the decoder alone, with what it generated.
        assert prefilled.num_cached_tokens == (0, 2 * BLOCK)[turn]
        assert decoded.error == ""
        asked, answered = prompt, decoded.token_ids
        prompt = [*prompt, *answered, *prompt_of(100, seed=51)]
    assert llama.last_read("b", "c").bytes == page_bytes()
    forget_prefixes(*llama.engines.values())
    assert llama.engines["a"].submit(asked, ANSWER).result(120).token_ids == answered


def test_states_come_with_the_attention_where_vllm_kept_one(gdn: Sharing) -> None:
    """VLLM keeps a state where two prompts part: the second prompt of a kind leaves one there, the third finds it."""
    common = prompt_of(2 * HYBRID_BLOCK + 40)
    first = gdn.engines["a"].submit([*common, *prompt_of(HYBRID_BLOCK - 30, seed=1)], ANSWER).result(120)
    second = gdn.engines["a"].submit([*common, *prompt_of(50, seed=2)], ANSWER).result(120)
    gdn.settle()
    third = gdn.engines["c"].submit([*common, *prompt_of(50, seed=2)], ANSWER).result(120)
    assert [one.num_cached_tokens for one in (first, second, third)] == [0, 0, 2 * HYBRID_BLOCK]
    assert third.token_ids == second.token_ids
    read = gdn.last_read("c", "a")
    assert [(group.kind, group.blocks) for group in read.groups] == [("mamba", 1)] * 3 + [("full", 2)]


def test_of_sliding_windows_only_the_blocks_of_the_last_one_are_moved(gemma: Sharing) -> None:
    """Four engines, each of which continues what the one before it answered. VLLM makes three groups of its layers."""
    prompt = prompt_of(5 * BLOCK + 30)
    held, before = 0, ""
    for name in ("a", "c", "b", "d"):
        gemma.settle()
        answered = gemma.engines[name].submit(prompt, ANSWER).result(120)
        assert answered.error == ""
        assert answered.num_cached_tokens == held
        if before:
            read = gemma.last_read(name, before)
            window = MODELS["gemma3"].config["sliding_window"] // BLOCK
            moved = {"sliding_window": window, "full": held // BLOCK}
            kinds = ("sliding_window", "sliding_window", "full")
            assert [(group.kind, group.blocks) for group in read.groups] == [
                (one, moved[one]) for one in kinds
            ]
            assert read.bytes == sum(2 * moved[one] * layer_bytes("gemma3") for one in kinds)
        held = (len(prompt) + ANSWER - 1) // BLOCK * BLOCK
        prompt, before = [*prompt, *answered.token_ids, *prompt_of(250, seed=ord(name))], name
    forget_prefixes(*gemma.engines.values())
    alone = gemma.engines["a"].submit(prompt[: -250 - ANSWER], ANSWER).result(120)
    assert alone.num_cached_tokens == 0
    assert list(alone.token_ids) == prompt[-250 - ANSWER : -250]
