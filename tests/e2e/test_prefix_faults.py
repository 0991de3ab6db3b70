"""Prefixes that are read while their holder loses them, stands still, or dies: right answers, and no block lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvctl.demo.engine import EngineAnswer
from tests.support import late_check
from tests.support.daemons import wait_for
from tests.support.deployments import prompt_of
from tests.support.engine_calls import engine_metrics, reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.forgetting import forget_prefixes
from tests.support.halting import halted
from tests.support.sharing import Sharing, sharing
from tests.support.sleeping_worker import EXTENSION, put_to_sleep, wake
from tests.support.started_kvd import start_kvd
from tests.support.tiny_models import ARGUMENTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER, TOKENS, BLOCK = 8, 700, 128
HELD = TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sharing]:
    """Two engines over TCP. The first has a small cache; the second asks late whether what it read was held."""
    with sharing(
        request.param,
        tmp_path_factory.mktemp("faults"),
        names=(("a",), ("b",)),
        extra={"load_timeout": 10.0, "prefix_wait": 5.0},
        module="tests.support.late_check",
        env={"UCX_TLS": "tcp,self", **late_check.environment(folder)},
        own={"a": {"kv_cache_memory_bytes": 16 << 20}},
        arguments={**ARGUMENTS.get(request.param, {}), "worker_extension_cls": EXTENSION},
    ) as running:
        yield running


def alone(pair: Sharing, prompt: list[int]) -> tuple[int, ...]:
    """What the second engine answers by itself; both hold nothing then."""
    for engine in pair.engines.values():
        wait_for(lambda engine=engine: reset_prefix_cache(engine), 60.0)  # type: ignore[misc]
    answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert answered.num_cached_tokens == 0
    forget_prefixes(pair.engines["b"])
    return answered.token_ids


def compute(pair: Sharing, prompt: list[int]) -> None:
    """The first engine computes a prompt, and both kvds know that it holds it."""
    assert pair.engines["a"].submit(prompt, 1).result(120).error == ""
    pair.settle()


def forget(pair: Sharing) -> None:
    """Fill the first engine's cache with other prompts."""
    others = [pair.engines["a"].submit(prompt_of(1000, seed=100 + n), 1) for n in range(8)]
    assert all(one.result(120).error == "" for one in others)


def held_back(
    pair: Sharing, folder: Path, prompt: list[int], held: Sequence[int] = ()
) -> tuple[tuple[int, ...], int, Future[EngineAnswer]]:
    """`b` has read what `a` holds of a prompt, and is kept from asking whether it still did until "hold" is gone.

    Gives the right answer, how many reads there were before, and the answer that is to come. `a` holds ``held`` too.
    """
    expected, before = alone(pair, prompt), len(pair.read("b", "a"))
    if held:
        compute(pair, [*held])
    compute(pair, prompt)
    (folder / "read").unlink(missing_ok=True)
    (folder / "hold").touch()
    asked = pair.engines["b"].submit(prompt, ANSWER)
    wait_for((folder / "read").exists, 60.0)
    return expected, before, asked


def held_before(pair: Sharing, folder: Path, prompt: list[int]) -> Future[EngineAnswer]:
    """`b` is about to read what `a` holds of a prompt, and waits until "before" is gone."""
    (folder / "begun").unlink(missing_ok=True)
    (folder / "before").touch()
    asked = pair.engines["b"].submit(prompt, ANSWER)
    wait_for((folder / "begun").exists, 60.0)
    return asked


@pytest.mark.parametrize("lose", ["evicted", "reset", "kept"])
def test_what_was_read_is_used_only_if_it_was_held_until_then(pair: Sharing, folder: Path, lose: str) -> None:
    prompt = prompt_of(TOKENS, seed=1)
    expected, before, asked = held_back(pair, folder, prompt)
    if lose == "evicted":
        forget(pair)
    elif lose == "reset":
        forget_prefixes(pair.engines["a"])
    (folder / "hold").unlink()
    answered = asked.result(120)

    assert (answered.error, answered.token_ids) == ("", expected)
    assert answered.num_cached_tokens == (HELD if lose == "kept" else 0)
    record = pair.last_read("b", "a", before)
    assert (record.state, record.code) == (("done", "") if lose == "kept" else ("miss", "PREFIX_LOST"))
    # Nothing is kept for anybody, on either side.
    forget_prefixes(*pair.engines.values())


def test_an_evicted_prefix_is_not_found(pair: Sharing) -> None:
    prompt = prompt_of(TOKENS, seed=2)
    expected, before = alone(pair, prompt), len(pair.read("b", "a"))
    compute(pair, prompt)
    forget(pair)
    answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert (answered.token_ids, answered.num_cached_tokens) == (expected, 0)
    assert len(pair.read("b", "a")) == before


def test_a_hint_on_what_is_gone_costs_one_question(pair: Sharing, folder: Path) -> None:
    prompt = prompt_of(TOKENS, seed=6)
    expected, before = alone(pair, prompt), len(pair.read("b", "a"))
    compute(pair, prompt)
    (folder / "quiet").touch()
    forget_prefixes(pair.engines["a"])
    questions = pair.counted("b", "prefixes.questions", "prefixes.questions_wasted")
    answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert (answered.error, answered.token_ids, answered.num_cached_tokens) == ("", expected, 0)
    assert pair.counted("b", *questions) == {name: count + 1 for name, count in questions.items()}
    assert len(pair.read("b", "a")) == before

    # As soon as that is told nobody is asked any more. Engines tell in their next step what they were kept from.
    (folder / "quiet").unlink()
    for seed, engine in enumerate(pair.engines.values(), 7):
        assert engine.submit(prompt_of(BLOCK + 1, seed=seed), 1).result(120).error == ""
    pair.settle()
    forget_prefixes(pair.engines["b"])
    questions = pair.counted("b", "prefixes.questions")
    assert pair.engines["b"].submit(prompt, ANSWER).result(120).token_ids == expected
    assert pair.counted("b", "prefixes.questions") == questions


def test_a_holder_that_stands_still_costs_the_wait_and_no_more(pair: Sharing) -> None:
    """Its scheduler names the prefix; of its workers no byte comes."""
    prompt = prompt_of(TOKENS, seed=3)
    expected = alone(pair, prompt)
    compute(pair, prompt)
    with halted(engine_pids(pair.engines["a"]).executing):
        answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert (answered.token_ids, answered.num_cached_tokens) == (expected, 0)


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_kvd_that_was_killed_and_is_back_finds_what_is_held(
    pair: Sharing, folder: Path, which: str
) -> None:
    """It is killed while a prefix is read: nobody can say any more whether that was held."""
    prompt = prompt_of(TOKENS, seed=4)
    expected, before, asked = held_back(pair, folder, prompt)
    kvd = pair.hosts[which]
    endpoint = kvd.endpoint()
    kvd.process.kill()
    kvd.process.wait()
    (folder / "hold").unlink()
    answered = asked.result(120)
    assert (answered.error, answered.token_ids, answered.num_cached_tokens) == ("", expected, 0)
    # Without it nothing is found.
    forget_prefixes(pair.engines["b"])
    answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert (answered.token_ids, answered.num_cached_tokens) == (expected, 0)
    forget_prefixes(pair.engines["b"])

    kvd.process = start_kvd(kvd.name, kvd.directory, listen=f"{endpoint.host}:{endpoint.port}").process
    wait_for(lambda: pair.lives(which), 60.0)
    pair.introduce()
    pair.settle()
    assert pair.last_read("b", "a", before).state == "miss"
    answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert (answered.token_ids, answered.num_cached_tokens) == (expected, HELD)
    forget_prefixes(*pair.engines.values())


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_holder_that_does_not_say_whether_it_held_a_prefix_did_not(pair: Sharing, folder: Path) -> None:
    """Its scheduler stands still, after all bytes have come."""
    prompt = prompt_of(TOKENS, seed=9)
    expected, before, asked = held_back(pair, folder, prompt)
    core = engine_pids(pair.engines["a"]).core
    assert core is not None
    with halted([core]):
        (folder / "hold").unlink()
        answered = asked.result(120)
    assert (answered.error, answered.token_ids, answered.num_cached_tokens) == ("", expected, 0)
    assert pair.last_read("b", "a", before).state == "miss"
    # It goes on, and what it holds is found as before.
    wait_for(lambda: pair.lives("a"), 60.0)
    forget_prefixes(pair.engines["b"])
    answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert (answered.token_ids, answered.num_cached_tokens) == (expected, HELD)
    forget_prefixes(*pair.engines.values())


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_holder_that_goes_to_sleep_while_it_is_read_holds_nothing(pair: Sharing, folder: Path) -> None:
    prompt = prompt_of(TOKENS, seed=8)
    expected, before, asked = held_back(pair, folder, prompt)
    assert pair.hinted("b", "a") > 0
    put_to_sleep(pair.engines["a"])
    (folder / "hold").unlink()
    answered = asked.result(120)
    assert (answered.error, answered.token_ids, answered.num_cached_tokens) == ("", expected, 0)
    assert pair.last_read("b", "a", before).code == "PREFIX_LOST"

    # Its hints ended with its generation, so that nobody asks it.
    wait_for(lambda: pair.hinted("b", "a") == 0, 30.0)
    forget_prefixes(pair.engines["b"])
    questions = pair.counted("b", "prefixes.questions")
    assert pair.engines["b"].submit(prompt, ANSWER).result(120).token_ids == expected
    assert pair.counted("b", "prefixes.questions") == questions

    # Awake it holds what it computes from then on.
    wake(pair.engines["a"])
    wait_for(lambda: pair.lives("a"), 60.0)
    pair.introduce()
    forget_prefixes(pair.engines["b"])
    compute(pair, prompt)
    answered = pair.engines["b"].submit(prompt, ANSWER).result(120)
    assert (answered.token_ids, answered.num_cached_tokens) == (expected, HELD)
    forget_prefixes(*pair.engines.values())


def test_a_holder_that_was_killed_while_it_was_read_is_a_miss(pair: Sharing, folder: Path) -> None:
    """One has read it, the other one begins to. The last test: it is not started again."""
    later = prompt_of(TOKENS, seed=10)
    right = alone(pair, later)
    expected, before, first = held_back(pair, folder, prompt_of(TOKENS, seed=5), held=later)
    second = held_before(pair, folder, later)
    for pid in engine_pids(pair.engines["a"]).executing:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not pair.lives("a"), 60.0)
    (folder / "hold").unlink()
    (folder / "before").unlink()

    answers = [one.result(120) for one in (first, second)]
    assert [(one.error, one.token_ids, one.num_cached_tokens) for one in answers] == [
        ("", expected, 0),
        ("", right, 0),
    ]
    pair.last_read("b", "a", before + 1)
    records = pair.read("b", "a")[:2]
    assert [record.state for record in records] == ["miss"] * 2
    assert "PREFIX_LOST" in {record.code for record in records}
    metrics = engine_metrics(pair.engines["b"])
    assert metrics.free_blocks == metrics.num_blocks
