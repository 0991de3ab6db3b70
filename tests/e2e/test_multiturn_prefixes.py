"""Turns of a chat through vLLM's multiturn proxy, unmodified: the prefiller reads what the decoder has answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from kvd.wire.handshake import GetPeer
from kvd.wire.transfer import TransferRecord
from tests.support import fleet as fleets
from tests.support.daemons import wait_for
from tests.support.deployments import prompt_of, transfers
from tests.support.fleet import Fleet, metric
from tests.support.openai_client import COMPLETIONS, GREEDY, answered, ask
from tests.support.router_cases import completion
from tests.support.routers import MULTITURN
from tests.support.sharing import SHARED

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK, TOKENS, ANSWER = 128, 300, 300


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("turns")
    with fleets.fleet("llama", folder, settings=SHARED, enable_prefix_caching=True, dtype="float32") as made:
        # As kvd does by itself for the kvds of its peer.connect.
        made.hosts[0].ask(
            GetPeer(local_engine="prefill", engine_id="decode-0", endpoint=made.hosts[1].endpoint())
        )
        yield made


def read(fleet: Fleet) -> list[TransferRecord]:
    """What the prefiller has read of the decoder's cache, newest first."""
    return [record for record in transfers(fleet.hosts[0]) if record.prefix and record.state == "done"]


def token_ids(fleet: Fleet, prompt: list[int]) -> list[int]:
    """What the engine by itself answers, in tokens: text of a random model would be cut into others."""
    body = {**GREEDY, "prompt": prompt, "max_tokens": ANSWER, "return_token_ids": True}
    connection, response = answered(fleet.single, COMPLETIONS, body)
    with contextlib.closing(connection):
        return list(json.loads(response.read())["choices"][0]["token_ids"])


def test_of_each_turn_the_prefiller_computes_what_neither_has(fleet: Fleet) -> None:
    prompt, held = prompt_of(TOKENS, seed=70), 0
    for turn in range(3):
        asked = completion(prompt, max_tokens=ANSWER)
        right, before = fleet.single_says(asked), computed(fleet)
        reply = ask(fleet.router(MULTITURN), asked, conversation_id="a chat")
        assert (reply.status, reply.choices) == (200, right.choices), reply.error
        if turn:
            assert wait_for(lambda turn=turn: len(read(fleet)) == turn, 30.0)  # type: ignore[misc]
            assert read(fleet)[0].remote_engine == "decode-0"
        assert computed(fleet) - before == len(prompt) - held
        # Of an answer's last token nothing is computed, so a block that ends with it is not there.
        held = (len(prompt) + ANSWER - 1) // BLOCK * BLOCK
        prompt = [*prompt, *token_ids(fleet, prompt), *prompt_of(40, seed=80 + turn)]


def computed(fleet: Fleet) -> float:
    """Tokens of prompts that the prefiller has computed."""
    return metric(fleet.prefill, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')
