"""Misses on an operator's order between real engines: each recovers, answers right, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kvctl.demo.deployment import PREFILL_PARAMS, Deployment, engines, transfer_config
from kvctl.demo.engine import EngineAnswer
from kvctl.processes.daemons import Kvd
from kvd.wire.query import EngineList, ListEngines
from tests.support import nursery
from tests.support.daemons import wait_for
from tests.support.deployments import handed_over, prompt_of, running, transfers
from tests.support.engine_calls import engine_metrics, reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.halting import halted

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER = 8
STEPS = ["forced", "quiesced", "reported", "rescheduled", "first_token"]


PAIRS = (("llama", "pull"), ("qwen3.5-gdn", "push"))


ALWAYS = ("qwen3.5-gdn", "push")
"""The pair of every run; `make e2e-matrix` has both."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(p, marks=() if p == ALWAYS else pytest.mark.matrix) for p in PAIRS],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One group of KV cache, and several; over TCP, where a stopped peer sends nothing."""
    model, mode = request.param
    folder = tmp_path_factory.mktemp("pair")
    with running(model, folder, mode=mode, env={"UCX_TLS": "tcp,self"}) as deployment:
        yield deployment


def kvctl(deployment: Deployment, *words: str, code: int = 0) -> Any:
    """`kvctl force-miss` on the decoder's host: its document, or where it fails its error."""
    command = [sys.executable, "-m", "kvctl", "force-miss", *words, "-o", "json", "--runtime-dir"]
    done = subprocess.run(
        [*command, str(deployment.decode_host.directory)],
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout or done.stderr.splitlines()[-1])


def followed(deployment: Deployment, order: dict[str, Any], *, code: int = 0) -> dict[str, Any]:
    """The order when it is over."""
    found: dict[str, Any] = kvctl(
        deployment, "--order", order["order_id"], "--wait", "--timeout", "120s", code=code
    )
    return found


def computed(deployment: Deployment, prompt: list[int]) -> tuple[int, ...]:
    """What the decoding engine computes of the whole prompt by itself; it forgets it again."""
    answer = deployment.decode.submit(prompt, ANSWER).result(120)
    forget(deployment)
    return answer.token_ids


def forget(deployment: Deployment) -> None:
    """Empty both prefix caches; that works only when no request holds a block."""
    for engine in (deployment.prefill, deployment.decode):
        wait_for(partial(reset_prefix_cache, engine), 60.0)


def nothing_is_left(deployment: Deployment) -> None:
    """No request runs or waits, and every block is free."""
    forget(deployment)
    values = engine_metrics(deployment.decode).values
    assert (values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]) == (0, 0)


def recovered(request: dict[str, Any], tokens: int) -> None:
    assert (request["state"], list(request["steps"])) == ("recovered", STEPS)
    assert list(request["steps"].values()) == sorted(request["steps"].values())
    assert request["kept"] + request["recomputed"] == tokens
    assert request["recomputed"] > 0
    assert request["cause"].startswith(f"forced by uid {os.getuid()}, pid ")


@pytest.mark.parametrize(
    "words",
    [
        ("--when", "before"),
        ("--when", "flight", "--rank", "tp0"),
        ("--when", "layers"),
        ("--group", "0"),
    ],
    ids=" ".join,
)
def test_the_next_load_misses_and_its_answer_is_right(pair: Deployment, words: tuple[str, ...]) -> None:
    prompt = prompt_of(300, seed=11)
    expected = computed(pair, prompt)
    order = kvctl(pair, "--next", "1", *words, "--yes")
    assert (order["carried_out"], order["open"]) == (True, True)

    asked = pair.ask(prompt, ANSWER)

    assert (asked.decoded.error, asked.decoded.token_ids) == ("", expected)
    (request,) = followed(pair, order)["requests"]
    recovered(request, len(prompt))
    (record,) = handed_over(pair, asked.handed_over)
    assert (record.state, record.cause) == ("miss", request["cause"])
    if "--when" in words:
        assert (record.bytes == 0) == ("before" in words)
    nothing_is_left(pair)
    after = pair.ask(prompt_of(200, seed=12), ANSWER)
    assert handed_over(pair, after.handed_over)[0].state == "done"


def test_three_of_four_loads_miss(pair: Deployment) -> None:
    prompts = [prompt_of(150 + 50 * number, seed=13) for number in range(4)]
    expected = [computed(pair, prompt) for prompt in prompts[:3]]
    order = kvctl(pair, "--next", "3", "--yes")
    asked = [pair.ask(prompt, ANSWER) for prompt in prompts]
    assert [one.decoded.token_ids for one in asked[:3]] == expected
    assert [handed_over(pair, one.handed_over)[0].state for one in asked] == [*["miss"] * 3, "done"]
    body = followed(pair, order)
    assert (body["open"], body["looked"], body["taken"], body["recovered"]) == (False, 3, 3, 3)
    assert 0 < body["recovery_p50"] <= body["recovery_p99"]
    nothing_is_left(pair)


def own_answers(
    pair: Deployment, prompts: list[list[int]], threads: ThreadPoolExecutor
) -> Iterator[list[tuple[int, ...]]]:
    """The decoder's own answers: whole and in the pieces of a hand-over, one at a time and beside others.

    What stands beside a prompt in a batch decides how sums are rounded, and with random weights now and then a token.
    """

    def whole(prompt: list[int]) -> tuple[int, ...]:
        return tuple(pair.decode.submit(prompt, ANSWER).result(300).token_ids)

    def in_pieces(prompt: list[int]) -> tuple[int, ...]:
        return tuple(pair.decode.submit_alone(prompt, ANSWER).result(300).token_ids[1:])

    for answer in (whole, in_pieces):
        forget(pair)
        yield [answer(prompt) for prompt in prompts]
        forget(pair)
        yield list(threads.map(answer, prompts))


def test_of_many_requests_at_once_a_part_misses_and_every_answer_is_right(pair: Deployment) -> None:
    prompts = [prompt_of(40 + 5 * number, seed=19) for number in range(24)]
    with ThreadPoolExecutor(8) as threads:
        right = [set(answers) for answers in zip(*own_answers(pair, prompts, threads), strict=True)]
        forget(pair)
        order = kvctl(pair, "--next", "24", "--ratio", "0.3", "--seed", "3", "--when", "flight", "--yes")
        asked = list(threads.map(lambda prompt: pair.ask(prompt, ANSWER, timeout=300), prompts))
    for one, answers in zip(asked, right, strict=True):
        assert one.decoded.error == ""
        assert one.decoded.token_ids in answers
    body = followed(pair, order)
    drawn = random.Random(3)
    assert body["taken"] == sum(drawn.random() < 0.3 for _ in prompts) > 0
    assert (body["looked"], body["recovered"]) == (len(prompts), body["taken"])
    nothing_is_left(pair)


def test_a_load_that_hangs_is_given_up_and_its_late_bytes_do_no_harm(pair: Deployment) -> None:
    pair.ask(prompt_of(120, seed=14), ANSWER)  # the pair knows each other
    prompt = prompt_of(300, seed=15)
    expected = computed(pair, prompt)
    prefilled = pair.prefill.submit(prompt, 1, PREFILL_PARAMS).result(120)
    with halted(engine_pids(pair.prefill).executing):
        name = f"hangs-{uuid.uuid4().hex[:6]}"
        decoding: Future[EngineAnswer] = pair.decode.submit(
            prompt, ANSWER, prefilled.kv_transfer_params, name
        )
        plan = wait_for(lambda: loading(pair), 60.0)
        assert (plan["carried_out"], plan["requests"][0]["request_id"].startswith(name)) == (False, True)
        assert transfers(pair.decode_host, 1)[0].request_id != plan["requests"][0]["request_id"]
        body = kvctl(pair, name, "--yes", "--wait", "--timeout", "120s")
        decoded = decoding.result(120)
    recovered(body["requests"][0], len(prompt))
    assert (decoded.error, decoded.token_ids) == ("", expected)
    # What was recomputed is cached now: late bytes would have spoilt it.
    assert pair.decode.submit(prompt, ANSWER).result(120).token_ids == expected
    nothing_is_left(pair)
    assert kvctl(pair, name, "--yes", code=1)["code"] == "KVD-FORCE-UNKNOWN"


def loading(deployment: Deployment) -> dict[str, Any] | None:
    """What an order for all that wait would do, once a load is under way; a pull, in either mode."""
    plan: dict[str, Any] = kvctl(deployment, "--waiting")
    return plan if any(request["cause"] for request in plan["requests"]) else None


def test_unknown_and_finished_requests_are_1_and_change_nothing(pair: Deployment) -> None:
    finished = pair.ask(prompt_of(130, seed=16), ANSWER).decoded.request_id
    assert "has no request" in kvctl(pair, "nobody", "--yes", code=1)["message"]
    assert "has finished" in kvctl(pair, finished, "--yes", code=1)["message"]
    asked = pair.ask(prompt_of(140, seed=17), ANSWER)
    assert handed_over(pair, asked.handed_over)[0].state == "done"


AS_NOBODY = """
import os, sys
from kvctl.main import main
main(["force-miss", "--waiting", "--runtime-dir", "/nonexistent"])  # imports what nobody may not be able to read
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(main(["force-miss", "--next", "1", "--yes", "--runtime-dir", sys.argv[1]]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_6_and_changes_nothing(pair: Deployment) -> None:
    directory = pair.decode_host.directory
    modes = {path: path.stat().st_mode for path in (directory / "kvd.sock", directory, *directory.parents)}
    for path, mode in modes.items():
        path.chmod(mode | (0o666 if path.is_socket() else 0o055))
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(directory)],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert done.returncode == 6, done.stderr
    assert "uid 65534 may not give orders" in done.stderr
    asked = pair.ask(prompt_of(140, seed=18), ANSWER)
    assert handed_over(pair, asked.handed_over)[0].state == "done"


@pytest.mark.matrix
@pytest.mark.parametrize("pair", PAIRS[:1], ids="-".join, indirect=True)
def test_an_engine_that_fails_requests_instead_is_5_and_carries_on(pair: Deployment, tmp_path: Path) -> None:
    host = pair.decode_host
    config = transfer_config(host, "strict", "kv_consumer", policy="fail")
    spec = dataclasses.replace(
        pair.decode.spec, work_dir=tmp_path, log_path=tmp_path / "log", kv_transfer_config=config
    )
    with engines(nursery.start) as start:
        strict = start(spec)
        strict.wait_ready()
        wait_for(lambda: host_has(host, "strict"), 60.0)
        for words in (("--next", "1"), ("--next", "1", "--yes"), ("--waiting", "--yes")):
            error = kvctl(pair, "--engine", "strict", *words, code=5)
            assert (error["code"], "'fail'" in error["message"]) == ("KVD-FORCE-POLICY", True)
        assert strict.submit(prompt_of(50), 2).result(120).error == ""


def host_has(host: Kvd, name: str) -> bool:
    """Whether an engine's scheduler is registered there."""
    rows = cast("EngineList", host.ask(ListEngines())).rows
    return any(row.engine.engine_id == name and row.scheduler for row in rows)
