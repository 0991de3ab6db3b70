"""kvctl doctor --peer: two real kvds with a key each, asked as an operator asks."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.doctor.peer_transports import UNPROBED
from kvd.keys import TrustedKey, write_trusted
from tests.kvctl.conftest import Run
from tests.support.daemons import facts, session, wait_for, worker
from tests.support.hosts import Host, hosts

Pair = dict[str, Host]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two hosts with a decoder and a prefiller, linked from ``a`` to ``b``."""
    with hosts("a", "b", KVD_ACCESS_HOSTS="*") as made:
        made["a"].daemon.stop()
        made["a"].daemon.environment["KVD_PEER_CONNECT"] = place(made["b"])
        made["a"].daemon.start()
        wait_for(lambda: any(peer.state == "up" for peer in made["a"].daemon.status().peers))
        with (
            session(made["a"].daemon, worker(facts("decode-0", role="decode"))),
            session(made["b"].daemon, worker(facts("prefill-0", role="prefill"))),
        ):
            yield made


def place(host: Host) -> str:
    return str(host.daemon.endpoint)


def checks(run: Run, pair: Pair, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the checks by code."""
    there = words or ("--peer", place(pair["b"]))
    outcome = run("--runtime-dir", pair["a"].daemon.directory, "doctor", "-o", "json", *there)
    assert outcome.out, outcome.err
    return outcome.code, {check["code"]: check for check in json.loads(outcome.out)["checks"]}


def test_two_hosts_that_are_well(run: Run, pair: Pair) -> None:
    _, found = checks(run, pair)
    states = {code: check["state"] for code, check in found.items()}
    assert {
        code: states[code]
        for code in ("PEER_ANSWERS", "PEER_THERE", "PEER_KEYS", "PEER_CLOCK", "PEER_VERSION")
    } == (dict.fromkeys(("PEER_ANSWERS", "PEER_THERE", "PEER_KEYS", "PEER_CLOCK", "PEER_VERSION"), "ok"))
    assert "linked" in found["PEER_THERE"]["found"]
    assert "give or take" in found["PEER_CLOCK"]["found"]
    # The tests' workers say direct, which does not leave its host.
    assert found["PEER_BACKENDS"]["state"] == "failed"
    # They export nothing of it, so it is said to be unknown.
    assert found["PEER_TRANSPORT"]["found"].startswith(
        "decode-0 from prefill-0: direct, over what is not known"
    )
    screen = run("--runtime-dir", pair["a"].daemon.directory, "doctor", "--peer", place(pair["b"]))
    assert "peer" in screen.out


def test_quick_reads_nothing_of_engines_there(run: Run, pair: Pair) -> None:
    _, found = checks(run, pair, "--peer", place(pair["b"]), "--quick")
    assert found["PEER_TRANSPORT"]["found"].endswith(UNPROBED)


def test_a_host_that_tells_nothing_is_a_warning(run: Run, pair: Pair) -> None:
    shy = pair["b"].daemon
    shy.stop()
    shy.environment["KVD_ACCESS_HOSTS"] = ""
    shy.start()
    try:
        _, found = checks(run, pair)
    finally:
        shy.stop()
        shy.environment["KVD_ACCESS_HOSTS"] = "*"
        shy.start()
    assert found["PEER_ACCESS"]["state"] == "warning"
    assert place(pair["a"]) in found["PEER_ACCESS"]["hint"]
    assert found["PEER_ANSWERS"]["state"] == "ok"
    assert "PEER_CLOCK" not in found
    # What would move bytes is told of engines there that this host's kvd has met; here none has.
    assert found["PEER_TRANSPORT"]["state"] == "skipped"


def test_each_way_of_not_answering_is_named(run: Run, pair: Pair) -> None:
    code, nobody = checks(run, pair, "--peer", "127.0.0.1:1")
    assert (code, nobody["PEER_KEY_UNKNOWN"]["state"]) == (1, "failed")
    assert "kvctl keys trust" in nobody["PEER_KEY_UNKNOWN"]["hint"]
    pair["b"].daemon.signal(signal.SIGSTOP)
    try:
        code, stopped = checks(run, pair, "--peer", place(pair["b"]), "--timeout", "0.3")
    finally:
        pair["b"].daemon.signal(signal.SIGCONT)
    assert (code, stopped["PEER_SILENT"]["state"]) == (1, "failed")
    assert "PEER_THERE" in stopped
    before = pair["a"].trusted.read_bytes()
    write_trusted(pair["a"].trusted, [TrustedKey(pair["a"].pair.public, "127.0.0.1", pair["b"].daemon.port)])
    try:
        code, wrong = checks(run, pair)
    finally:
        pair["a"].trusted.write_bytes(before)
    assert (code, wrong["PEER_KEY"]["state"]) == (1, "failed")
    assert "kvctl keys trust" in wrong["PEER_KEY"]["hint"]


def test_what_is_no_peer_is_wrong_usage(run: Run, pair: Pair) -> None:
    for words, told in (
        (("--peer", place(pair["a"])), "is this host itself"),
        (("--peer", "nowhere"), "is no host of kvd"),
        (("--peer", place(pair["b"]), "--fleet"), "leave --fleet out"),
    ):
        refused = run("--runtime-dir", pair["a"].daemon.directory, "doctor", *words)
        assert (refused.code, told in refused.err) == (2, True), refused.err
