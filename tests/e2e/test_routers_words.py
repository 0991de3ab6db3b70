"""What each router sends and does, as docs/routers.md says, in front of servers that note what they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.noting_servers import ABSENT, GIVEN, Noting, noting
from tests.support.openai_client import Asked, Reply, ask
from tests.support.router_cases import chat, completion
from tests.support.routers import MULTITURN, ROUTERS, TOY, VLLM_ROUTER, routed

pytestmark = [pytest.mark.e2e]

ASKED_FOR = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What all of them send along to the prefiller."""
OWN = {"do_remote_prefill": True, "remote_engine_id": "the client's"}


@dataclass
class Behind:
    """A router and the servers behind it."""

    router: str
    url: str
    prefill: Noting
    decodes: tuple[Noting, Noting]

    def ask(self, asked: Asked, **more: Any) -> Reply:
        """A request; the prefiller gives `GIVEN` unless a test says otherwise."""
        return ask(self.url, asked, **more)

    @property
    def decoded(self) -> list[dict[str, Any]]:
        """What the decoders were asked."""
        return [body for one in self.decodes for body in one.bodies]


@pytest.fixture(scope="module", params=[*ROUTERS, MULTITURN])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    with contextlib.ExitStack() as stack:
        prefill, *decodes = (stack.enter_context(noting()) for _ in range(3))
        folder = tmp_path_factory.mktemp("router")
        url = stack.enter_context(routed(request.param, [prefill.url], [one.url for one in decodes], folder))
        yield Behind(request.param, url, prefill, (decodes[0], decodes[1]))


@pytest.fixture
def behind(running: Behind) -> Behind:
    for server in (running.prefill, *running.decodes):
        server.forget()
    running.prefill.params = dict(GIVEN)
    return running


def test_the_prefiller_is_asked_for_one_token_and_to_keep_its_blocks(behind: Behind) -> None:
    behind.ask(
        completion("hi", min_tokens=3, stream=True, stream_options={"include_usage": True}, stop=["z"])
    )
    (body,) = behind.prefill.bodies
    assert body["kv_transfer_params"] == ASKED_FOR
    assert (body["max_tokens"], body["stream"], body["prompt"], body["stop"]) == (1, False, "hi", ["z"])
    assert body.get("min_tokens") == (1 if behind.router == VLLM_ROUTER else None)
    assert "stream_options" not in body
    (body,) = behind.decoded
    assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (24, 3, True)


def test_a_chats_prefill_is_one_token_too(behind: Behind) -> None:
    behind.ask(chat("hi", max_completion_tokens=7))
    (body,) = behind.prefill.bodies
    assert body["max_tokens"] == 1
    assert body.get("max_completion_tokens", 1) == 1
    assert behind.decoded[0]["max_completion_tokens"] == 7


def test_the_decoder_gets_the_prefillers_params_as_they_are(behind: Behind) -> None:
    assert behind.ask(completion("hi")).choices[0][1] == "said"
    host = "127.0.0.1" if behind.router == MULTITURN else GIVEN["remote_host"]
    params = behind.decoded[0]["kv_transfer_params"]
    assert params == {**GIVEN, "remote_host": host}
    assert isinstance(params["kvd_lease_seconds"], float)


@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[5, 6], [7]]}])
def test_lists_and_n_are_one_request_with_one_set_of_params(behind: Behind, more: dict[str, Any]) -> None:
    behind.ask(completion("hi"), **more)
    for body in (*behind.prefill.bodies, *behind.decoded):
        assert {name: body[name] for name in more} == more
    assert len(behind.decoded) == 1


def test_the_prefillers_params_replace_a_clients(behind: Behind) -> None:
    behind.ask(completion("hi"), kv_transfer_params=OWN)
    assert behind.prefill.bodies[0]["kv_transfer_params"] == ASKED_FOR
    assert behind.decoded[0]["kv_transfer_params"]["remote_engine_id"] == "p"


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        (None, {VLLM_ROUTER: None, TOY: OWN, MULTITURN: ASKED_FOR}),
        (ABSENT, {VLLM_ROUTER: OWN, TOY: OWN, MULTITURN: ASKED_FOR}),
    ],
)
def test_where_the_prefiller_gives_no_params_a_clients_may_reach_the_decoder(
    behind: Behind, given: Any, handed_on: dict[str, Any]
) -> None:
    behind.prefill.params = given
    assert behind.ask(completion("hi"), kv_transfer_params=OWN).status == 200
    assert behind.decoded[0]["kv_transfer_params"] == handed_on[behind.router]


def test_both_sides_get_one_request_id_that_no_client_chose(behind: Behind) -> None:
    behind.ask(completion("hi"))
    there = behind.prefill.headers[0]["x-request-id"]
    (here,) = (headers["x-request-id"] for one in behind.decodes for headers in one.headers)
    assert there == here
    if behind.router == VLLM_ROUTER:
        assert f"___prefill_addr_{behind.prefill.url.removeprefix('http://')}___decode_addr_" in there


def test_decoders_take_turns(behind: Behind) -> None:
    for _ in range(4):
        behind.ask(completion("hi"))
    assert [len(one.bodies) for one in behind.decodes] == [2, 2]


@pytest.mark.parametrize("status", [400, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prefiller_that_fails_is_the_clients_error(behind: Behind, status: int, stream: bool) -> None:
    behind.prefill.status = status
    reply = behind.ask(completion("hi", stream=stream))
    assert reply.status == (400 if status == 400 and behind.router == VLLM_ROUTER else 500)
    assert not behind.decoded


@pytest.mark.parametrize("status", [400, 500])
def test_a_decoder_that_fails_is_the_clients_error(behind: Behind, status: int) -> None:
    for one in behind.decodes:
        one.status = status
    reply = behind.ask(completion("hi"))
    # The toy proxy has said 200 by then, and breaks off.
    assert reply.status == {VLLM_ROUTER: status, TOY: 0, MULTITURN: 500}[behind.router]


def test_the_multiturn_proxy_hands_what_a_decoder_gives_to_the_next_turns_prefiller(behind: Behind) -> None:
    for one in behind.decodes:
        one.params = {**GIVEN, "remote_engine_id": "d", "do_remote_prefill": False, "do_remote_decode": True}
    for _ in range(2):
        behind.ask(chat("hi"), conversation_id="c")
    second = behind.prefill.bodies[1]["kv_transfer_params"]
    if behind.router == MULTITURN:
        assert (second["remote_engine_id"], second["remote_host"]) == ("d", "127.0.0.1")
        assert (second["do_remote_decode"], second["do_remote_prefill"]) == (True, False)
    else:
        assert second == ASKED_FOR
