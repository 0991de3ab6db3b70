"""Pull mode between two real engines: the output, and the bytes that moved for it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from kvctl.demo.deployment import Deployment, engine_id
from kvctl.demo.engine import EngineAnswer
from kvd.wire.handshake import GetPeer
from tests.support.daemons import wait_for
from tests.support.deployments import HYBRID_BLOCK, prompt_of, transfers_of
from tests.support.engine_calls import reset_prefix_cache
from tests.support.forgetting import forget_prefixes
from tests.support.processor import FLOAT32_STATES
from tests.support.tiny_models import MODELS

pytestmark = pytest.mark.e2e

LENGTHS = (100, 300, 1000)
ANSWER = 16


def kvctl(deployment: Deployment, *words: str) -> Any:
    """What kvctl says about the decoder's host, as JSON."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvctl",
            "--runtime-dir",
            str(deployment.decode_host.directory),
            *words,
            "-o",
            "json",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def transfer_of(deployment: Deployment, prefilled: EngineAnswer) -> dict[str, Any]:
    """What ``kvctl transfers`` says of one hand-over."""
    record = transfers_of(deployment, prefilled)[0]
    rows = kvctl(deployment, "transfers")["transfers"]
    row: dict[str, Any] = next(row for row in rows if row["transfer_id"] == record.transfer_id)
    return row


def introduce(deployment: Deployment) -> None:
    """Have the decoder's workers handed the prefiller, as kvd does by itself for the kvds of its peer.connect."""
    there = deployment.prefill_host
    names = engine_id(deployment.decode_host), engine_id(there)
    deployment.decode_host.ask(GetPeer(local_engine=names[0], engine_id=names[1], endpoint=there.endpoint()))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_llama_decodes_what_another_engine_prefilled(llama: Deployment, tokens: int) -> None:
    prompt = prompt_of(tokens)
    alone = llama.decode.submit(prompt, ANSWER).result(120)
    forget_prefixes(llama.decode)
    introduce(llama)

    asked = llama.ask(prompt, ANSWER)

    assert asked.decoded.error == ""
    assert asked.decoded.token_ids == alone.token_ids
    config = MODELS["llama"].config
    blocks = math.ceil(tokens / 128)
    page = 128 * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    transfer = transfer_of(llama, asked.prefilled)
    assert transfer["state"] == "done"
    assert transfer["tokens"] == tokens
    assert transfer["stages"]["handshake"] == 0
    assert transfer["bytes"] == blocks * page * config["num_hidden_layers"]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_gated_delta_net_hybrid_decodes_what_another_engine_prefilled(gdn: Deployment, tokens: int) -> None:
    prompt = prompt_of(tokens)
    alone = gdn.decode.submit_alone(prompt, ANSWER).result(120)
    forget_prefixes(gdn.decode)

    asked = gdn.ask(prompt, ANSWER)

    assert asked.decoded.error == ""
    assert asked.decoded.num_cached_tokens == tokens - 1
    assert asked.decoded.token_ids == alone.token_ids[1:]
    transfer = transfer_of(gdn, asked.prefilled)
    assert transfer["bytes"] == hybrid_bytes(gdn, tokens - 1)
    assert [g["kind"] for g in transfer["groups"]].count("mamba") == 3


def test_a_gated_delta_net_decoder_that_has_the_attention_is_brought_the_state_and_the_rest(
    gdn: Deployment,
) -> None:
    """The same prompt again, then one that continues it; what the decoder answers stays the same."""
    longer = prompt_of(3 * HYBRID_BLOCK + 50, seed=3)
    first = longer[: 2 * HYBRID_BLOCK + 50]
    expected = {}
    for prompt in (first, longer):
        expected[len(prompt)] = gdn.decode.submit_alone(prompt, ANSWER).result(120).token_ids[1:]
        forget_prefixes(gdn.decode)
    for prompt, here in ((first, 0), (first, 2), (longer, 2), (longer, 3)):
        # Who computes a prompt in other pieces rounds otherwise.
        wait_for(partial(reset_prefix_cache, gdn.prefill), 60.0)
        asked = gdn.ask(prompt, ANSWER)
        assert asked.decoded.token_ids == expected[len(prompt)]
        assert transfer_of(gdn, asked.prefilled)["bytes"] == hybrid_bytes(gdn, len(prompt) - 1, here)


def hybrid_bytes(deployment: Deployment, tokens: int, here: int = 0) -> int:
    """The bytes of a load of so many tokens, of which the decoder's attention has ``here`` blocks."""
    config = MODELS["qwen3.5-gdn"].config
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    conv = (config["linear_conv_kernel_dim"] - 1) * (2 * key + value) * 2
    ssm = value * config["linear_key_head_dim"] * (4 if FLOAT32_STATES else 2)
    block = last_block_size(deployment)
    page = block * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    kinds = config["layer_types"]
    states, attentions = kinds.count("linear_attention"), kinds.count("full_attention")
    return int(states * (conv + ssm) + attentions * (math.ceil(tokens / block) - here) * page)


def last_block_size(deployment: Deployment) -> int:
    """The attention block size that vLLM chose for the hybrid."""
    pairs = kvctl(deployment, "describe-topology")["pairs"]
    return int(next(g["block_size"] for g in pairs[0]["groups"] if g["kind"] == "full"))
