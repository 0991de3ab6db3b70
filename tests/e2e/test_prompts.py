"""Real engines: KV of one prompt is never taken for another's, whatever a router hands on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment
from kvd.wire.transfer import SCHEDULER_RANK, TransferRecord
from tests.support.adapters import answered, write_adapter
from tests.support.daemons import wait_for
from tests.support.deployments import (
    counter,
    leased,
    prompt_of,
    running,
    transfers,
)
from tests.support.engine_calls import reset_prefix_cache

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ANSWER = 12
TOKENS = 300


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """They pull and push."""
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    # No prefix caches: every answer is of what came, or of what was computed for it.
    with running(
        "llama",
        tmp_path_factory.mktemp("prompts"),
        mode="push",
        extra={"mode": "push"},
        arguments=lora,
        enable_prefix_caching=False,
    ) as deployment:
        yield deployment


def right(engines: Deployment, prompt: list[int], **more: Any) -> tuple[int, ...]:
    return answered(engines.decode, prompt, ANSWER, **more).token_ids


def prefilled(engines: Deployment, prompt: list[int], **more: Any) -> Mapping[str, Any]:
    params = answered(engines.prefill, prompt, 1, PREFILL_PARAMS, **more).kv_transfer_params
    assert params is not None
    leased(engines)
    return params


def decoded(
    engines: Deployment, prompt: list[int], params: Mapping[str, Any], **more: Any
) -> tuple[int, ...]:
    answer = answered(engines.decode, prompt, ANSWER, params, **more)
    assert answer.error == ""
    return answer.token_ids


def records(engines: Deployment, name: str, count: int) -> list[TransferRecord]:
    """All records of a prefill or a transfer id, oldest first, once there are so many."""

    def look() -> list[TransferRecord] | None:
        found = [one for one in transfers(engines.decode_host) if one.remote_request_id == name]
        assert len(found) <= count
        return found[::-1] if len(found) == count else None

    return wait_for(look, 60.0)


def nothing_is_left(engines: Deployment) -> None:
    """No lease, and no block that any request holds: only then can caches be emptied."""
    leased(engines, 0)
    for engine in (engines.prefill, engines.decode):
        wait_for(partial(reset_prefix_cache, engine), 60.0)


def test_one_answers_params_serve_its_prompt_and_no_other(engines: Deployment) -> None:
    """As behind a router that hands one set of params on to all of a list of prompts."""
    first, second = prompt_of(TOKENS, seed=1), prompt_of(TOKENS, seed=2)
    params = prefilled(engines, first)
    assert decoded(engines, second, params) == right(engines, second)
    leased(engines, 1)
    assert decoded(engines, first, params) == right(engines, first)
    miss, load = records(engines, params["remote_request_id"], 2)
    assert (miss.state, miss.code, miss.local_rank) == ("miss", "PROMPT_MISMATCH", SCHEDULER_RANK)
    assert (load.state, load.code) == ("done", "")
    nothing_is_left(engines)


def test_a_prompt_that_differs_in_one_token_or_in_its_length_is_another(engines: Deployment) -> None:
    prompt = prompt_of(TOKENS, seed=3)
    params = prefilled(engines, prompt)
    others = ([*prompt[:-1], prompt[-1] + 1], prompt[:-1], [prompt[0] + 1, *prompt[1:]])
    for other in others:
        assert decoded(engines, other, params) == right(engines, other)
    longer = [*prompt, *prompt_of(20, seed=4)]
    assert decoded(engines, longer, params) == right(engines, longer)
    found = records(engines, params["remote_request_id"], 4)
    assert [one.code for one in found] == ["PROMPT_MISMATCH"] * 3 + [""]


def test_doctor_and_transfers_show_it(engines: Deployment) -> None:
    def kvctl(*words: str) -> Any:
        where = ["--runtime-dir", str(engines.decode_host.directory), "-o", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", *words, *where], check=False, capture_output=True, text=True
        )
        return json.loads(done.stdout)

    prompt, other = prompt_of(TOKENS, seed=5), prompt_of(TOKENS, seed=6)
    params = prefilled(engines, prompt)
    decoded(engines, other, params)
    records(engines, params["remote_request_id"], 1)
    listed = kvctl("transfers", "--code", "PROMPT_MISMATCH", "--last", "1")["transfers"]
    assert listed[0]["remote_request_id"] == params["remote_request_id"]
    checks = {check["code"]: check for check in kvctl("doctor")["checks"]}
    assert checks["PROMPT_MISMATCH"]["found"].startswith(tuple("123456789"))
    assert counter(engines.decode_host, "misses.PROMPT_MISMATCH") >= 1
    decoded(engines, prompt, params)


def test_a_pushed_prompt_is_written_for_its_own_decoder_request_only(engines: Deployment) -> None:
    first, second = prompt_of(TOKENS, seed=7), prompt_of(TOKENS, seed=8)
    for computed in (first, second):
        name = uuid.uuid4().hex
        there, here = engines.push_params(name)
        decoding = engines.decode.submit(second, ANSWER, here)
        engines.prefill.submit(computed, 1, there).result(120)
        answer = decoding.result(120)
        assert (answer.error, answer.token_ids) == ("", right(engines, second))
        (record,) = records(engines, name, 1)
        expected = ("done", "") if computed is second else ("miss", "PROMPT_MISMATCH")
        assert (record.state, record.code, record.mode) == (*expected, "push")
    nothing_is_left(engines)


def test_a_mismatch_in_push_ends_the_wait_at_once(engines: Deployment) -> None:
    """Also where the prefiller is far ahead of the decoder: what it kept is kept no longer."""
    first, second = prompt_of(TOKENS, seed=9), prompt_of(TOKENS, seed=10)
    name = uuid.uuid4().hex
    there, here = engines.push_params(name)
    engines.prefill.submit(first, 1, there).result(120)
    answer = engines.decode.submit(second, ANSWER, here).result(120)
    assert (answer.error, answer.token_ids) == ("", right(engines, second))
    (record,) = records(engines, name, 1)
    assert record.code == "PROMPT_MISMATCH"
    assert sum(record.stages.values()) < 60.0, "push_timeout is longer"


def test_two_prompts_under_one_transfer_id_are_both_answered_right(engines: Deployment) -> None:
    prompts = [prompt_of(TOKENS, seed=seed) for seed in (11, 12)]
    there, here = engines.push_params(uuid.uuid4().hex)
    prefilling = [engines.prefill.submit(prompt, 1, there) for prompt in prompts]
    decoding = [engines.decode.submit(prompt, ANSWER, here) for prompt in reversed(prompts)]
    for future in prefilling:
        future.result(120)
    answers = [future.result(120) for future in decoding]
    assert [answer.error for answer in answers] == ["", ""]
    assert [answer.token_ids for answer in answers] == [right(engines, p) for p in reversed(prompts)]


def test_a_prompt_of_the_base_model_is_none_of_an_adapters_and_the_other_way_round(
    engines: Deployment, tmp_path: Path
) -> None:
    model = Path(engines.prefill.spec.model)
    poet = write_adapter(model, tmp_path / "here" / "poet", seed=1)
    twin = Path(shutil.copytree(poet, tmp_path / "there" / "dichter"))
    other = write_adapter(model, tmp_path / "elsewhere" / "poet", seed=2)
    prompt = prompt_of(TOKENS, seed=13)
    answers = {adapter: right(engines, prompt, adapter=adapter) for adapter in (None, twin, other)}
    assert len(set(answers.values())) == 3, "the adapters answer otherwise"
    for prefiller, same in ((None, None), (poet, twin)):
        params = prefilled(engines, prompt, adapter=prefiller)
        for decoder in (other, twin if same is None else None, same):  # who may read it comes last
            assert decoded(engines, prompt, params, adapter=decoder) == answers[decoder], (prefiller, decoder)
        codes = [record.code for record in records(engines, params["remote_request_id"], 3)]
        assert codes == ["PROMPT_MISMATCH", "PROMPT_MISMATCH", ""]
    nothing_is_left(engines)
