"""describe-topology and doctor of all hosts: real kvds with a key each, engines that are alike and one that is not."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from kvd.wire.identity import Role
from tests.kvctl.conftest import Run
from tests.support.daemons import facts, geometry, session, worker
from tests.support.hosts import Host, hosts

Fleet = dict[str, Host]
NAMES = ("a", "b", "c", "d")
ENGINES: tuple[tuple[str, str, Role, str], ...] = (
    ("a", "decode-0", "decode", "float32"),
    ("b", "decode-1", "decode", "float32"),
    ("c", "decode-2", "decode", "float32"),
    ("c", "prefill-0", "prefill", "float32"),
    ("d", "prefill-1", "prefill", "bfloat16"),
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Decoders on a, b and c, prefillers on c and d.

    The prefiller on d has another type of cache, and an engine on b misses a worker.
    """
    with ExitStack() as stack:
        made = stack.enter_context(hosts(*NAMES, KVD_ACCESS_HOSTS="*"))
        for host, name, role, dtype in ENGINES:
            one = worker(facts(name, model="tiny", role=role, dtype=dtype))
            card = msgspec.structs.replace(one.card, geometry=geometry(dtype=dtype))
            stack.enter_context(session(made[host].daemon, msgspec.structs.replace(one, card=card)))
        half = worker(facts("decode-9", model="other", role="decode", tp=2))
        stack.enter_context(session(made["b"].daemon, half))
        yield made


@pytest.fixture
def typed(run: Run, fleet: Fleet) -> Run:
    """kvctl on host ``a``."""
    return lambda *words: run("--runtime-dir", fleet["a"].daemon.directory, *words)


def place(host: Host) -> str:
    return str(host.daemon.endpoint)


@pytest.fixture
def silent(fleet: Fleet) -> Iterator[str]:
    """Host ``d``, stopped for a while; its kernel goes on and takes connections."""
    fleet["d"].daemon.signal(signal.SIGSTOP)
    yield place(fleet["d"])
    fleet["d"].daemon.signal(signal.SIGCONT)


def test_pairs_of_all_hosts_are_told_of_once_for_engines_that_are_alike(typed: Run, fleet: Fleet) -> None:
    answer = typed("describe-topology", "--fleet", "-o", "json")
    assert answer.code == 1, answer.err  # prefill-1 has another type of cache
    body = json.loads(answer.out)
    assert (body["kind"], body["hosts"], body["unanswered"]) == ("FleetTopology", 4, [])
    found = {tuple(one["engine_id"] for one in pair["sources"]): pair for pair in body["pairs"]}
    assert set(found) == {("prefill-0",), ("prefill-1",)}
    fits = found["prefill-0",]
    assert fits["compatible"]
    assert {(one["engine_id"], one["host"]) for one in fits["readers"]} == {
        (f"decode-{n}", place(fleet[name])) for n, name in enumerate("abc")
    }
    assert not found["prefill-1",]["compatible"]
    table = typed("describe-topology", "--fleet").out
    assert "decode-{0..2}" in table
    assert "x3" in table


def test_named_engines_are_compared_across_hosts(typed: Run) -> None:
    one = json.loads(typed("describe-topology", "decode-1", "--fleet", "-o", "json").out)["pairs"]
    assert {pair["local"]["engine_id"] for pair in one} == {"decode-1"}
    two = typed("describe-topology", "decode-0", "prefill-0", "--fleet", "-o", "json")
    assert two.code == 0
    (pair,) = json.loads(two.out)["pairs"]
    assert (pair["local"]["engine_id"], pair["remote"]["engine_id"]) == ("decode-0", "prefill-0")
    assert "decode-0" in typed("describe-topology", "decode-0", "prefill-0", "--fleet", "-o", "mermaid").out
    unknown = typed("describe-topology", "decode-7", "--fleet")
    assert (unknown.code, "no host that answered has an engine 'decode-7'; did you mean" in unknown.err) == (
        2,
        True,
    )
    assert (
        typed(
            "describe-topology", "--model", "qwen3-32b", "--local", "tp=1", "--remote", "tp=1", "--fleet"
        ).code
        == 2
    )


def test_doctor_tells_what_is_wrong_on_which_host(typed: Run, fleet: Fleet) -> None:
    answer = typed("doctor", "--fleet", "-o", "json")
    body = json.loads(answer.out)
    assert (body["kind"], body["hosts"], body["unanswered"]) == ("FleetDoctor", 4, [])
    assert {check["host"] for check in body["checks"] if check["code"] == "KVD"} == {
        place(host) for host in fleet.values()
    }
    bad = {
        (check["host"], check["code"]) for check in body["checks"] if check["state"] in ("warning", "failed")
    }
    assert (place(fleet["b"]), "ENGINE_PARTIAL") in bad
    assert (answer.code == 1) == (body["failed"] > 0)
    table = typed("doctor", "--fleet").out
    assert "ENGINE_PARTIAL" in table
    assert "4 hosts" in table
    assert typed("doctor", "--fleet", "--quick").code == 2


def test_who_is_silent_is_named_and_not_waited_for(typed: Run, silent: str) -> None:
    for command in ("doctor", "describe-topology"):
        began = time.monotonic()
        answer = typed(command, "--fleet", "-o", "json", "--timeout", "1.5s")
        assert time.monotonic() - began < 4.0
        assert answer.code == 4, answer.err
        body = json.loads(answer.out)
        assert [one["host"] for one in body["unanswered"]] == [silent]
        assert len(body["checks" if command == "doctor" else "pairs"]) > 0
        assert f"1 of 4 hosts did not answer: {silent}" in answer.err
