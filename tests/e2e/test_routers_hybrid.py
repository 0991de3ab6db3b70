"""Unmodified routers in front of a prefiller and a decoder of a hybrid: every answer is one engine's.

Its kernels round otherwise where a prompt is computed in other pieces, and in other company. So every prompt has
`TOKENS` tokens, and every engine computes all but the last of them in one step, one request at a time: as the
prefiller does, which leaves the last to the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fleet as fleets
from tests.support.deployments import prompt_of
from tests.support.fleet import AT_MOST, MANY_AT_MOST, Fleet, same
from tests.support.openai_client import ask, ask_at_once
from tests.support.router_cases import Case, cases, completion, many
from tests.support.routers import MULTITURN, ROUTERS, TOY

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.routers, pytest.mark.timeout(900)]

TOKENS = 600
CASES = cases(TOKENS)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("hybrid")
    with fleets.fleet("qwen3.5-gdn", folder, max_num_batched_tokens=TOKENS - 1, max_num_seqs=1) as made:
        yield made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("router", ROUTERS)
def test_answers_are_one_engines(fleet: Fleet, router: str, case: Case) -> None:
    fleet.answers(router, case)


@pytest.mark.parametrize("router", ROUTERS)
def test_24_at_once_are_answered_as_by_one_engine(fleet: Fleet, router: str) -> None:
    requests = many(TOKENS, 24)
    right = [fleet.single_says(asked) for asked in requests]
    for reply, one, asked in zip(ask_at_once(fleet.router(router), requests), right, requests, strict=True):
        same(reply, one, MANY_AT_MOST, str(asked)[:200])


def test_a_client_cannot_have_the_kv_of_another_prompt(fleet: Fleet) -> None:
    mine = completion(prompt_of(TOKENS, 63))
    for url in (fleet.decodes[0], fleet.router(TOY, prefill=fleet.single)):
        before = fleet.newest()
        params = fleet.handed_on(prompt_of(TOKENS, 62))
        same(ask(url, mine, kv_transfer_params=params), fleet.single_says(mine), AT_MOST)
        assert not fleet.loaded(before)


@pytest.mark.parametrize("router", [TOY, MULTITURN])
def test_a_decoder_that_is_asked_for_a_prefill_answers_in_full(fleet: Fleet, router: str) -> None:
    """As it is where the prefiller gives no params: by the client behind one router, by the other router itself."""
    asked = completion(prompt_of(TOKENS, 64))
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    reply = ask(fleet.router(router, prefill=fleet.single), asked, kv_transfer_params=params)
    assert (reply.status, reply.choices) == (200, fleet.single_says(asked).choices), reply.error


def test_no_block_is_left(fleet: Fleet) -> None:
    fleet.nothing_is_left()
