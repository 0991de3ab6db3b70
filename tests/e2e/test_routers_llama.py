"""Unmodified routers in front of a prefiller and two decoders of a Llama: every answer is one engine's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import fleet as fleets
from tests.support.daemons import wait_for
from tests.support.deployments import prompt_of
from tests.support.fleet import AT_MOST, MANY_AT_MOST, Fleet, at_work, blocks_left, metric, same
from tests.support.noting_servers import noting
from tests.support.openai_client import (
    COMPLETIONS,
    GREEDY,
    Asked,
    Reply,
    agree,
    answered,
    ask,
    ask_at_once,
    sent,
)
from tests.support.router_cases import OF_OTHERS, Case, cases, chat, completion, many, text_of
from tests.support.routers import MULTITURN, ROUTERS, TOY, VLLM_ROUTER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 300
CASES = cases(TOKENS)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleets.fleet("llama", tmp_path_factory.mktemp("routers"), decoders=2, dtype="float32") as made:
        yield made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("router", ROUTERS)
def test_answers_are_one_engines(fleet: Fleet, router: str, case: Case) -> None:
    fleet.answers(router, case)


@pytest.mark.parametrize("router", ROUTERS)
def test_stop_ends_an_answer_where_it_ends_one_engines(fleet: Fleet, router: str) -> None:
    prompt = prompt_of(TOKENS, 30)
    said = str(fleet.single_says(completion(prompt)).choices[0][1])
    for asked in (completion(prompt, stop=said[9:12]), completion(prompt, stop=[said[0]], stream=True)):
        right = fleet.single_says(asked)
        assert right.choices[0][2] == "stop"
        same(ask(fleet.router(router), asked), right)


@pytest.mark.parametrize("router", ROUTERS)
def test_log_probabilities_of_an_echo_are_right_though_vllm_router_says_them_twice(
    fleet: Fleet, router: str
) -> None:
    asked = completion(prompt_of(TOKENS, 31), echo=True, logprobs=1)
    reply, right = ask(fleet.router(router), asked), fleet.single_says(asked)
    ((_, text, ended, tokens, _),), ((*_, right_tokens, _),) = reply.choices, right.choices
    assert (text, ended) == right.choices[0][1:3]
    if router == VLLM_ROUTER:  # it puts the prefiller's before the decoder's, which has them as well
        assert agree(tokens[:TOKENS], right_tokens[:TOKENS])
        tokens = tokens[TOKENS:]
    assert agree(tokens, right_tokens)


@pytest.mark.parametrize("asked", [completion(prompt_of(1, 3)), completion("a"), chat("b")])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_prompt_of_one_token_is_answered(fleet: Fleet, router: str, asked: Asked) -> None:
    same(ask(fleet.router(router), asked), fleet.single_says(asked))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", [completion, chat])
def test_answers_by_the_multiturn_proxy_are_one_engines(fleet: Fleet, turn: Any, stream: bool) -> None:
    for number in range(2):  # of the second turn the proxy hands what the decoder said to the prefiller
        asked = turn(text_of(TOKENS, 40 + number), stream=stream)
        right, before = fleet.single_says(asked), fleet.newest()
        reply = ask(fleet.router(MULTITURN), asked, conversation_id=f"{turn.__name__} {stream}")
        assert (reply.status, reply.choices) == (200, right.choices), reply.error
        assert reply.seconds < AT_MOST
        wait_for(lambda before=before: fleet.loaded(before), 10.0)  # type: ignore[misc]


@pytest.mark.parametrize("router", ROUTERS)
def test_64_at_once_are_answered_as_by_one_engine(fleet: Fleet, router: str) -> None:
    requests = many(TOKENS, 64)
    before = [metric(url, "vllm:request_success_total") for url in fleet.decodes]
    if "64" not in fleet.kept:
        fleet.kept["64"] = ask_at_once(fleet.single, requests)
    for reply, right, asked in zip(
        ask_at_once(fleet.router(router), requests), fleet.kept["64"], requests, strict=True
    ):
        assert right.status == 200
        same(reply, right, MANY_AT_MOST, str(asked)[:200])
    answered = [
        metric(url, "vllm:request_success_total") - was
        for url, was in zip(fleet.decodes, before, strict=True)
    ]
    assert min(answered) > 16, "both decoders have their part"


@pytest.mark.parametrize("router", ROUTERS)
def test_a_client_that_goes_away_ends_its_request(fleet: Fleet, router: str) -> None:
    most = 1400
    body = {**GREEDY, "prompt": prompt_of(TOKENS, 50), "max_tokens": most, "stream": True}
    before = sum(metric(url, "vllm:generation_tokens_total") for url in fleet.decodes)
    connection, response = answered(fleet.router(router), COMPLETIONS, body)
    assert response.read(1)
    response.close()
    connection.close()
    wait_for(lambda: not any(map(at_work, fleet.decodes)), 30.0)
    assert 0 < sum(metric(url, "vllm:generation_tokens_total") for url in fleet.decodes) - before < most


@pytest.mark.parametrize("router", ROUTERS)
def test_a_client_that_goes_away_before_its_answer_leaves_nothing(fleet: Fleet, router: str) -> None:
    url = fleet.router(router)
    body = {**GREEDY, "prompt": prompt_of(1500, 51), "max_tokens": 400}
    for _ in range(4):
        sent(url, COMPLETIONS, body).close()
    wait_for(lambda: not any(map(at_work, (fleet.prefill, *fleet.decodes))), 60.0)
    same(ask(url, CASES["tokens"].asked), fleet.single_says(CASES["tokens"].asked))


@pytest.mark.parametrize("params", OF_OTHERS.values(), ids=OF_OTHERS)
@pytest.mark.parametrize("router", ROUTERS)
def test_params_that_a_client_sends_change_no_answer(fleet: Fleet, router: str, params: Any) -> None:
    asked = completion(prompt_of(TOKENS, 60), kv_transfer_params=params)
    right, before = fleet.single_says(completion(prompt_of(TOKENS, 60))), fleet.newest()
    same(ask(fleet.router(router), asked), right)
    wait_for(lambda: fleet.loaded(before), 10.0)


@pytest.mark.parametrize("params", OF_OTHERS.values(), ids=OF_OTHERS)
@pytest.mark.parametrize("router", [*ROUTERS, MULTITURN])
def test_params_that_a_client_sends_change_no_answer_where_the_prefiller_gives_none(
    fleet: Fleet, router: str, params: Any
) -> None:
    asked = completion(prompt_of(TOKENS, 61), kv_transfer_params=params)
    right = fleet.single_says(completion(prompt_of(TOKENS, 61)))
    reply = ask(fleet.router(router, prefill=fleet.single), asked)
    assert (reply.status, reply.choices) == (200, right.choices), reply.error
    assert reply.seconds < AT_MOST


@pytest.mark.parametrize(
    "same_beginning", [0, TOKENS - 1], ids=["another prompt", "a prompt with another last token"]
)
def test_a_client_cannot_have_the_kv_of_another_prompt(fleet: Fleet, same_beginning: int) -> None:
    theirs = prompt_of(TOKENS, 62)
    mine = completion(theirs[:same_beginning] + prompt_of(TOKENS, 63)[same_beginning:])
    right = fleet.single_says(mine)
    for url in (fleet.decodes[0], fleet.router(TOY, prefill=fleet.single)):
        before = fleet.newest()
        same(ask(url, mine, kv_transfer_params=fleet.handed_on(theirs)), right)
        assert not fleet.loaded(before)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_prefiller_that_fails_is_an_error_and_leaves_nothing(
    fleet: Fleet, router: str, stream: bool
) -> None:
    with noting() as failing:
        failing.status = 500
        url = fleet.router(router, prefill=failing.url)
        reply = ask(url, completion(prompt_of(TOKENS, 70), stream=stream))
    assert reply.status == 500
    assert reply.seconds < AT_MOST
    assert not any(map(at_work, fleet.decodes))


def test_no_block_is_left(fleet: Fleet) -> None:
    fleet.nothing_is_left()


def test_a_prefiller_that_dies_midway_makes_no_answer_wrong(fleet: Fleet) -> None:
    requests = [completion(prompt_of(1200, 80 + number)) for number in range(12)]
    right = ask_at_once(fleet.single, requests)
    urls = [fleet.router(router) for router in ROUTERS]
    finished = metric(fleet.prefill, "vllm:request_success_total")
    replies: dict[str, list[Reply]] = {}
    threads = [
        threading.Thread(target=lambda url=url: replies.update({url: ask_at_once(url, requests)}))
        for url in urls
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: metric(fleet.prefill, "vllm:request_success_total") > finished, 60.0)
    os.killpg(fleet.pids[fleet.prefill], signal.SIGKILL)
    for thread in threads:
        thread.join()
    for url in urls:
        for reply, one in zip(replies[url], right, strict=True):
            assert reply.status != 200 or reply.choices == one.choices
            assert reply.seconds < MANY_AT_MOST
    assert any(reply.status == 200 for url in urls for reply in replies[url])
    for url in fleet.decodes:
        wait_for(lambda url=url: blocks_left(url) == 0, 60.0)  # type: ignore[misc]
