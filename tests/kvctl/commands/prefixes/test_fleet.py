"""`kvctl cache --fleet`, `kvctl prefix --fleet` and `--host`: real kvds with a key each, asked side by side."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest

from tests.kvctl.conftest import Run
from tests.support.hosts import Host, hosts
from tests.support.prefix_holders import BLOCK, Holder, holding, sharing

HELD = {"a": 2 * BLOCK, "b": 4 * BLOCK, "c": 0}
"""Tokens that the engine of each host holds of every prompt; ``a`` is where kvctl is typed."""
PROMPT = ",".join(map(str, range(5 * BLOCK)))

Fleet = dict[str, tuple[Host, Holder]]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with (
        hosts(*HELD, KVD_ACCESS_HOSTS="*") as made,
        holding(made["a"].daemon, sharing("engine-a"), HELD["a"]) as a,
        holding(made["b"].daemon, sharing("engine-b"), HELD["b"]) as b,
        holding(made["c"].daemon, sharing("engine-c"), HELD["c"]) as c,
    ):
        yield {"a": (made["a"], a), "b": (made["b"], b), "c": (made["c"], c)}


@pytest.fixture
def typed(run: Run, fleet: Fleet) -> Run:
    """kvctl on host ``a``."""
    return lambda *words: run("--runtime-dir", fleet["a"][0].daemon.directory, *words)


@pytest.fixture
def silent(fleet: Fleet) -> Iterator[str]:
    """Host ``b``, stopped for a while; its kernel goes on and takes connections."""
    fleet["b"][0].daemon.signal(signal.SIGSTOP)
    yield place(fleet, "b")
    fleet["b"][0].daemon.signal(signal.SIGCONT)


def place(fleet: Fleet, name: str) -> str:
    return str(fleet[name][0].daemon.endpoint)


def test_another_host_is_asked_as_this_one_is(typed: Run, fleet: Fleet) -> None:
    there = ("--host", place(fleet, "b"))
    assert typed("cache", *there, "-o", "name").out.split() == ["engine-b"]
    (row,) = json.loads(typed("prefix", "--tokens", PROMPT, *there, "-o", "json").out)["holders"]
    assert (row["engine_id"], row["tokens"]) == ("engine-b", HELD["b"])


def test_all_hosts_are_asked_what_their_engines_hold(typed: Run, fleet: Fleet) -> None:
    answer = typed("cache", "--fleet", "-o", "json")
    assert answer.code == 0, answer.err
    body = json.loads(answer.out)
    assert (body["kind"], body["hosts"], body["unanswered"]) == ("FleetCaches", 3, [])
    assert {row["engine_id"]: (row["host"], row["blocks"], row["pool"]) for row in body["caches"]} == {
        f"engine-{name}": (place(fleet, name), held // BLOCK, 64) for name, held in HELD.items()
    }
    assert typed("cache", "--fleet", "--sort", "blocks", "-o", "name").out.split()[-1] == "engine-c"
    assert (
        typed("cache", "--fleet", "--filter", f"host={place(fleet, 'b')}", "-o", "name").out == "engine-b\n"
    )
    table = typed("cache", "--fleet").out
    assert "all 3: OF 64" in table
    assert place(fleet, "c") in table


def test_all_hosts_are_asked_who_holds_a_prompt(typed: Run, fleet: Fleet) -> None:
    answer = typed("prefix", "--tokens", PROMPT, "--fleet", "-o", "json")
    assert answer.code == 0, answer.err
    body = json.loads(answer.out)
    assert (body["kind"], body["asked"], body["tokens"]) == ("FleetPrefixHolders", "tokens", 5 * BLOCK)
    assert {row["host"]: (row["engine_id"], row["tokens"]) for row in body["holders"]} == {
        place(fleet, name): (f"engine-{name}", held) for name, held in HELD.items()
    }
    _, *rows = typed("prefix", "--tokens", PROMPT, "--fleet").out.splitlines()
    assert [row.split()[:3] for row in rows] == [
        [f"engine-{name}", place(fleet, name), str(HELD[name])] for name in ("b", "a", "c")
    ], "who holds most stands first"
    assert typed("prefix", "--tokens", PROMPT, "--fleet", "-o", "name").out.split() == [
        "engine-a",
        "engine-b",
    ]
    block = json.loads(typed("prefix", "ab" * 32, "--fleet", "-o", "json").out)
    assert [row["held"] for row in block["holders"]] == [True] * 3


@pytest.mark.parametrize("words", [("cache",), ("prefix", "--tokens", PROMPT)], ids=["cache", "prefix"])
def test_who_is_silent_is_named_and_not_waited_for(typed: Run, silent: str, words: tuple[str, ...]) -> None:
    began = time.monotonic()
    answer = typed(*words, "--fleet", "-o", "json", "--timeout", "1s")
    assert time.monotonic() - began < 3.0
    assert answer.code == 4
    body = json.loads(answer.out)
    assert [one["host"] for one in body["unanswered"]] == [silent]
    assert "KVD-CTL-UNANSWERED" in answer.err
    assert "NOT ANSWERED" in typed(*words, "--fleet", "--timeout", "1s").out


def test_an_engine_that_does_not_tell_costs_the_others_nothing(typed: Run, fleet: Fleet) -> None:
    """Its kvd answers in a fleet's time, and says so."""
    fleet["b"][1].tells = False
    try:
        for words, rows in ((("cache",), "caches"), (("prefix", "--tokens", PROMPT), "holders")):
            answer = typed(*words, "--fleet", "-o", "json")
            assert answer.code == 0, answer.err
            found = {row["engine_id"]: row["trouble"] for row in json.loads(answer.out)[rows]}
            assert found.pop("engine-b")
            assert found == {"engine-a": "", "engine-c": ""}
    finally:
        fleet["b"][1].tells = True


def test_a_fleet_is_no_single_host(typed: Run, fleet: Fleet) -> None:
    for words in (("cache",), ("prefix", "--tokens", "1")):
        assert typed("--host", place(fleet, "b"), *words, "--fleet").code == 2


def test_of_a_fleet_where_nobody_shares_it_says_how_to(run: Run) -> None:
    with hosts("a", "b", KVD_ACCESS_HOSTS="*") as made:
        for words in (("cache",), ("prefix", "--tokens", "1")):
            answer = run("--runtime-dir", made["a"].daemon.directory, *words, "--fleet")
            assert answer.code == 0, answer.err
            assert "no engine of these hosts shares prefixes" in answer.err
