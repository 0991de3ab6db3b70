"""Turns of a chat through vLLM's multiturn proxy, unmodified: the prefiller reads what the decoder has answered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.wire.handshake import GetPeer
from kvd.wire.transfer import TransferRecord
from tests.support import fleet as fleets
from tests.support.daemons import wait_for
from tests.support.deployments import transfers
from tests.support.fleet import Fleet, metric
from tests.support.openai_client import ask
from tests.support.router_cases import completion, text_of
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


def test_of_each_turn_the_prefiller_computes_what_neither_has(fleet: Fleet) -> None:
    text, said = text_of(TOKENS, 70), 0
    for turn in range(3):
        asked = completion(text, max_tokens=ANSWER)
        right = fleet.single_says(asked)
        computed = metric(fleet.prefill, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')
        reply = ask(fleet.router(MULTITURN), asked, conversation_id="a chat")
        assert (reply.status, reply.choices) == (200, right.choices), reply.error
        assert right.usage is not None
        prompt = right.usage[0]
        # Of an answer's last token nothing is computed, so a block that ends with it is not there.
        held = max(0, said - 1) // BLOCK * BLOCK
        if turn:
            wait_for(lambda turn=turn: len(read(fleet)) == turn, 30.0)  # type: ignore[misc]
            assert read(fleet)[0].remote_engine == "decode-0"
        now = metric(fleet.prefill, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')
        assert now - computed == prompt - held
        said = prompt + ANSWER
        text += str(right.choices[0][1]) + text_of(40, 80 + turn)
