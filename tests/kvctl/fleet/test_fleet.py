"""Other hosts, one and all of them: real kvds with a key each, some stopped, asked as an operator asks."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.keys import TrustedKey, write_pair, write_trusted
from kvd.wire.registration import OpenLease
from tests.kvctl.conftest import Run
from tests.support.daemons import facts, reporter, scheduler, session, wait_for, worker
from tests.support.hosts import Host, hosts
from tests.support.ledgers import record

Fleet = dict[str, Host]
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Four hosts that let each other's operators ask; ``a`` is where kvctl is typed."""
    with (
        hosts(*NAMES, KVD_ACCESS_HOSTS="*") as made,
        session(made["a"].daemon, worker(facts("engine-a", model="tiny", role="decode"))),
        session(made["b"].daemon, worker(facts("engine-b", model="tiny", role="decode"))),
        session(
            made["b"].daemon,
            scheduler(facts("engine-b", model="tiny", role="decode"), (OpenLease("r1", 60.0, 3),)),
        ),
        session(made["c"].daemon, worker(facts("engine-c", model="other", role="decode", tp=2))),
        reporter(made["d"].daemon, "engine-d") as report,
    ):
        report(record(1, "done", "engine-d"), record(2, "miss", "engine-d"))
        yield made


@pytest.fixture
def typed(run: Run, fleet: Fleet) -> Run:
    """kvctl on host ``a``."""
    return lambda *words: run("--runtime-dir", fleet["a"].daemon.directory, *words)


def place(host: Host) -> str:
    return str(host.daemon.endpoint)


@pytest.fixture
def silent(fleet: Fleet) -> Iterator[str]:
    """Host ``b``, stopped for a while; its kernel goes on and takes connections."""
    fleet["b"].daemon.signal(signal.SIGSTOP)
    yield place(fleet["b"])
    fleet["b"].daemon.signal(signal.SIGCONT)


# --- one host ---


def test_another_host_is_asked_as_this_one_is(typed: Run, fleet: Fleet) -> None:
    asked = typed("--host", place(fleet["c"]), "status", "-o", "json")
    assert asked.code == 0, asked.err
    assert json.loads(asked.out)["pid"] == fleet["c"].daemon.pid
    assert "engine-c" in typed("engines", "--host", place(fleet["c"])).out
    rows = json.loads(typed("workers", "--host", place(fleet["c"]), "-o", "json").out)["workers"]
    assert [row["engine_id"] for row in rows] == ["engine-c"]
    listed = json.loads(typed("transfers", "--host", place(fleet["d"]), "-o", "json").out)
    assert listed["total"] == 2
    assert typed("transfer", "t1", "--host", place(fleet["d"])).code == 0
    assert typed("slow", "--host", place(fleet["d"])).code == 0
    assert typed("top", "--once", "--host", place(fleet["d"])).code == 0


def test_what_is_done_on_its_own_host_alone_is_refused(typed: Run, fleet: Fleet) -> None:
    for words in (("doctor",), ("bundle",), ("ports",), ("keys", "show"), ("events",), ("wait", "kvd")):
        refused = typed("--host", place(fleet["c"]), *words)
        assert refused.code == 2
        assert f"--host {place(fleet['c'])}: this command is about its own host" in refused.err
    refused = typed("--host", place(fleet["c"]), "force-miss", "r", "--yes")
    assert refused.code in (2, 5), refused.err


def test_a_host_that_names_nobody_answers_what_peers_may_ask(typed: Run, fleet: Fleet) -> None:
    shy = fleet["c"]
    shy.daemon.stop()
    shy.daemon.environment["KVD_ACCESS_HOSTS"] = ""
    shy.daemon.start()
    try:
        refused = typed("--host", place(shy), "status")
        assert refused.code == 6
        assert "[KVD-NOT-PERMITTED]" in refused.err
        assert "access.hosts" in refused.err
        assert typed("--host", place(shy), "engines").code == 0
        both = typed("status", "--fleet", "-o", "json")
        assert both.code == 4
        (missing,) = json.loads(both.out)["unanswered"]
        assert (missing["host"], missing["code"]) == (place(shy), "KVD-NOT-PERMITTED")
    finally:
        shy.daemon.stop()
        shy.daemon.environment["KVD_ACCESS_HOSTS"] = "*"
        shy.daemon.start()
        # Its worker comes back by itself, and other tests look for it.
        wait_for(lambda: "engine-c" in shy.daemon.engines())


def test_each_way_of_not_reaching_a_host_is_named(typed: Run, silent: str) -> None:
    stopped = typed("--host", silent, "--timeout", "0.3", "status")
    assert stopped.code == 4
    assert f"the kvd at {silent} did not answer in time" in stopped.err
    assert "[KVD-TIMEOUT]" in stopped.err
    nobody = typed("--host", "127.0.0.1:1", "status")
    assert nobody.code == 2
    assert "no key is known for the kvd at 127.0.0.1:1" in nobody.err
    unknown = typed("--host", "nowhere", "status")
    assert unknown.code == 2
    assert "is no host of kvd" in unknown.err


def test_another_key_than_is_expected_and_one_that_is_not_let_in_are_told_apart(
    run: Run, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_of(tmp_path, fleet, monkeypatch)
    out = run("--context", "desk", "--host", place(fleet["c"]), "engines")
    assert out.code == 6
    assert "does not let the key" in out.err
    assert "[KVD-KEY-NOT-TRUSTED]" in out.err
    write_trusted(
        desk / "trusted.keys", [TrustedKey(fleet["a"].pair.public, "127.0.0.1", fleet["c"].daemon.port)]
    )
    wrong = run("--context", "desk", "--host", place(fleet["c"]), "engines")
    assert wrong.code == 6
    assert "it may have another key than" in wrong.err


# --- all hosts ---


def test_all_hosts_are_asked_and_each_row_has_its_host(typed: Run, fleet: Fleet) -> None:
    answer = typed("engines", "--fleet", "-o", "json")
    assert answer.code == 0, answer.err
    body = json.loads(answer.out)
    assert body["kind"] == "FleetEngines"
    assert (body["hosts"], body["unanswered"]) == (4, [])
    assert {row["engine_id"]: row["host"] for row in body["engines"]} == {
        f"engine-{name}": place(fleet[name]) for name in NAMES
    }
    kvds = json.loads(typed("status", "--fleet", "-o", "json").out)["kvds"]
    assert [row["host"] for row in kvds] == sorted(place(host) for host in fleet.values())
    assert {row["host"]: row["misses"] for row in kvds}[place(fleet["d"])] == 1
    workers = json.loads(typed("workers", "--fleet", "-o", "json").out)["workers"]
    assert {row["engine_id"]: row["host"] for row in workers}["engine-b"] == place(fleet["b"])
    (lease,) = json.loads(typed("leases", "--fleet", "-o", "json").out)["leases"]
    assert (lease["host"], lease["request_id"], lease["blocks"]) == (place(fleet["b"]), "r1", 3)
    moved = json.loads(typed("transfers", "--fleet", "-o", "json").out)
    assert {(row["host"], row["local_engine"]) for row in moved["transfers"]} == {
        (place(fleet["d"]), "engine-d")
    }
    pairs = json.loads(typed("slow", "--fleet", "-o", "json").out)["pairs"]
    assert {row["host"] for row in pairs} == {place(fleet["d"])}
    assert "engine-d" in typed("transfers", "--fleet", "--by", "pair").out


def test_rows_are_filtered_and_sorted_and_what_all_share_stands_above(typed: Run, fleet: Fleet) -> None:
    names = typed("engines", "--fleet", "-o", "name", "--sort", "name").out.split()
    assert names == sorted(names)
    assert typed("engines", "--fleet", "-o", "name", "--model", "oth*").out.split() == ["engine-c"]
    assert typed("engines", "--fleet", "-o", "name", "--state", "partial").out.split() == ["engine-c"]
    table = typed("engines", "--fleet", "--role", "decode").out
    shared, _, below = table.partition("\n\n")
    assert shared.startswith("all 3: ROLE decode")
    assert "MODEL" not in shared
    assert "MODEL" in below
    assert typed("engines", "--fleet", "--model", "tiny").out.count("tiny") >= 1
    assert typed("status", "--sort", "misses").code == 2
    first, *_ = json.loads(typed("status", "--fleet", "--sort", "misses", "-o", "json").out)["kvds"]
    assert first["host"] == place(fleet["d"])


def test_who_is_silent_is_named_and_not_waited_for(typed: Run, silent: str) -> None:
    for command in ("engines", "workers", "leases", "transfers", "slow", "status"):
        began = time.monotonic()
        answer = typed(command, "--fleet", "-o", "json", "--timeout", "1s")
        assert time.monotonic() - began < 3.0
        assert answer.code == 4
        body = json.loads(answer.out)
        assert [one["host"] for one in body["unanswered"]] == [silent]
        assert "KVD-CTL-UNANSWERED" in answer.err
    table = typed("status", "--fleet", "--timeout", "1s")
    assert "NOT ANSWERED" in table.out
    assert f"kvctl: 1 of 4 hosts did not answer: {silent}" in table.err


def test_where_no_host_has_a_row_that_is_said(typed: Run) -> None:
    for words, told in (
        (("engines", "--role", "prefill"), "no host that answered has an engine that is prefill"),
        (("workers", "--engine", "nobody"), "no host that answered has a worker of nobody"),
        (("leases", "--engine", "nobody"), "no host that answered has an open lease of nobody"),
        (("agents", "--engine", "nobody"), "no worker of nobody at a host that answered holds anything"),
        (
            ("transfers", "--engine", "nobody"),
            "none of the 2 transfers in the ledgers of the hosts that answered",
        ),
        (("transfers", "--engine", "nobody", "--by", "pair"), "none of the 2 transfers in the ledgers"),
    ):
        answer = typed(*words, "--fleet")
        assert answer.code == 0
        assert told in answer.err


def test_a_fleet_is_no_single_host_and_no_trace(typed: Run, fleet: Fleet) -> None:
    assert typed("--host", place(fleet["b"]), "engines", "--fleet").code == 2
    assert typed("transfers", "--fleet", "--from", "x").code == 2
    assert typed("slow", "--fleet", "--from", "x").code == 2


# --- contexts ---


def desk_of(tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator's own keys and context for hosts c and d; nobody lets the key in yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    keys = tmp_path / "xdg" / "kvctl" / "desk"
    keys.mkdir(parents=True)
    write_pair(keys / "host.keys")
    write_trusted(keys / "trusted.keys", [fleet[name].line for name in ("c", "d")])
    (keys.parent / "contexts.yaml").write_text(f"contexts:\n  desk:\n    keys: {keys}\n")
    return keys


def test_a_context_has_keys_and_hosts_of_its_own(
    run: Run, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_of(tmp_path, fleet, monkeypatch)
    public = (desk / "host.keys").read_text().split("public ")[1].split()[0]
    for name in ("c", "d"):
        others = [fleet[other].line for other in NAMES if other != name]
        before = fleet[name].counter("keys.changes")
        write_trusted(fleet[name].trusted, [*others, TrustedKey(public.encode())])
        while fleet[name].counter("keys.changes") == before:
            time.sleep(0.01)
    assert run("context", "use", "desk").code == 0
    assert json.loads(run("context", "list", "-o", "json").out)["contexts"][0]["in_use"]
    body = json.loads(run("status", "--fleet", "-o", "json").out)
    assert {row["host"] for row in body["kvds"]} == {place(fleet["c"]), place(fleet["d"])}
    only = desk.parent / "contexts.yaml"
    only.write_text(only.read_text() + f"    hosts: ['{place(fleet['d'])}']\n")
    assert [row["host"] for row in json.loads(run("status", "--fleet", "-o", "json").out)["kvds"]] == [
        place(fleet["d"])
    ]
    assert place(fleet["d"]) in run("context", "show").out
    assert run("--context", "desk", "--host", "127.0.0.1", "status").code == 0
    assert run("context", "use", "--none").code == 0
    assert run("context", "show").code == 2


def test_mistakes_in_contexts_are_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run("context", "list").code == 0
    assert "there is no context 'prod'" in run("context", "use", "prod").err
    assert run("context", "use").code == 2
    file = tmp_path / "kvctl" / "contexts.yaml"
    file.parent.mkdir()
    for text, told in (
        ("contexts: [", "holds no contexts"),
        ("contexts: {prod: {kyes: /x}}", "unknown field"),
        ("contexts: {prod: {hosts: [nowhere]}}", "'nowhere' is not host:port"),
    ):
        file.write_text(text)
        refused = run("context", "list")
        assert refused.code == 2
        assert told in refused.err
        assert str(file) in refused.err
    file.write_text("contexts: {prod: {keys: /nonexistent, hosts: ['127.0.0.1:1']}}")
    assert "did you mean prod?" in run("--context", "prd", "status", "--fleet").err
    missing = run("--context", "prod", "status", "--fleet")
    assert missing.code == 2
    assert "/nonexistent/host.keys" in missing.err


def test_a_context_that_is_typed_for_one_host_alone_is_refused_and_not_passed_over(
    typed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = typed("engines", "--context", "prod")
    assert refused.code == 2
    assert "neither --host nor --fleet asks one; --fleet asks all of them, --host HOST one" in refused.err
    monkeypatch.setenv("KVCTL_CONTEXT", "prod")
    assert typed("engines").code == 0


def test_without_a_kvd_and_a_context_no_other_host_is_known_and_both_are_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for words in (("--fleet",), ("--host", "10.0.0.8")):
        missing = run("engines", *words, "--runtime-dir", "/nonexistent")
        assert missing.code == 3
        assert "no kvd here: /nonexistent/kvd.sock does not exist, and no context is in use" in missing.err
        assert "start kvd here, or write a context: kvctl context --help" in missing.err
