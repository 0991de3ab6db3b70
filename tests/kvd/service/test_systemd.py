"""kvd under a real systemd, with the unit that is shipped: all of its hardening is in force."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.daemons import WORKER_PROCESS, wait_for
from tests.support.systemd import PATHS, PYTHON, Machine, NoSystemd, booted

SETTINGS = """
peer: {listen: "127.0.0.1:0"}
metrics: {listen: "127.0.0.1:9402"}
liveness: {settle_seconds: 600}
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    try:
        with booted() as made:
            yield made
    except NoSystemd as reason:
        pytest.skip(str(reason))


@pytest.fixture
def served(machine: Machine) -> Iterator[Machine]:
    """A machine whose kvd has just been started, with sockets for peers and for metrics."""
    machine.write("/etc/kvd/kvd.yaml", SETTINGS)
    machine.systemctl("reset-failed")
    machine.systemctl("start", "kvd")
    yield machine
    machine.systemctl("stop", "kvd")


def asked(machine: Machine, *arguments: str) -> Any:
    """What kvctl says inside, as JSON; None where it cannot."""
    done = machine.kvctl(*arguments, "-o", "json")
    return json.loads(done.stdout) if done.returncode == 0 else None


@contextmanager
def registered(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """A worker's process inside, of root, that has registered."""
    arguments = (PATHS, "worker", "e", "0", "1", "/run/kvd")
    with subprocess.Popen(
        machine.command(PYTHON, "-c", WORKER_PROCESS, *arguments), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "registered\n"
            yield process
        finally:
            process.kill()


def workers(machine: Machine) -> list[Any]:
    """The workers that kvd knows."""
    found: list[Any] = (asked(machine, "workers") or {"workers": []})["workers"]
    return found


RECORD = """
from tests.support.ledgers import record
from tests.support.daemons import Daemon, reporter
from pathlib import Path
with reporter(Daemon(Path("/run/kvd"))) as report:
    print(type(report(record(1))).__name__)
"""


def test_it_is_started_when_it_serves_peers_and_metrics_too(served: Machine) -> None:
    assert "serving /run/kvd/kvd.sock, peers at 127.0.0.1:" in served.shows("StatusText")
    assert asked(served, "status")["draining"] is False
    ready = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9402/readyz').status)"
    assert served.run(PYTHON, "-c", ready).stdout == "200\n"
    owner = served.run("stat", "--format", "%U:%G %a", "/run/kvd", "/var/lib/kvd").stdout.splitlines()
    assert owner == ["kvd:kvd 750", "kvd:kvd 750"]


def test_the_process_that_compares_engines_runs_in_its_sandbox(served: Machine) -> None:
    def started() -> bool:
        status = asked(served, "status")
        return bool(status) and status["counters"].get("handshakes.comparers_started", 0) > 0

    wait_for(started, 20)


def test_members_of_its_group_may_ask_and_others_are_told_why_not(served: Machine) -> None:
    served.run("useradd", "--system", "--groups", "kvd", "vllm")
    ask = (PYTHON, "-c", "from kvctl.main import run; run()", "status")
    path = f"PYTHONPATH={PATHS}"
    assert served.run("runuser", "-u", "vllm", "--", "env", path, *ask).returncode == 0
    other = served.run("runuser", "-u", "nobody", "--", "env", path, *ask)
    assert other.returncode == 6
    assert "/run/kvd" in other.stderr
    assert "group kvd" in other.stderr


def test_with_keys_it_listens_to_the_network_and_says_when_it_may_not_read_them(machine: Machine) -> None:
    machine.write(
        "/etc/kvd/kvd.yaml",
        "peer: {listen: '0.0.0.0:0', advertise: '10.0.0.7:7766', curve: {key_file: /etc/kvd/peer.keys}}\n",
    )
    assert machine.run("kvd", "--new-keys", "/etc/kvd/peer.keys").returncode == 0
    assert machine.run("systemctl", "start", "kvd").returncode != 0
    machine.systemctl("stop", "kvd")
    user = machine.run("id", "--user", "kvd").stdout.strip()
    errors = machine.run("journalctl", "--unit", "kvd", "--priority", "err", "--output", "cat").stdout
    assert "kvd: cannot read the keys in /etc/kvd/peer.keys: Permission denied [KVD-KEY-FILE]\n" in errors
    assert f"chown {user} /etc/kvd/peer.keys" in errors
    assert machine.run("chown", "kvd:", "/etc/kvd/peer.keys").returncode == 0
    machine.systemctl("start", "kvd")
    assert "peers at 10.0.0.7:7766" in machine.shows("StatusText")
    machine.systemctl("stop", "kvd")


def test_a_worker_that_dies_is_seen_at_once(served: Machine) -> None:
    with registered(served):
        [row] = workers(served)
        served.run("kill", "-KILL", str(row["pid"]))
        gone = wait_for(lambda: [w for w in workers(served) if w["state"] == "gone"])
    assert "process" in gone[0]["reason"]


def test_killed_it_comes_back_and_its_workers_with_it(served: Machine) -> None:
    before = asked(served, "status")["generation"]
    with registered(served):
        served.run("kill", "-KILL", served.shows("MainPID"))
        after = wait_for(lambda: asked(served, "status"))["generation"]
        assert after != before
        assert wait_for(lambda: [w for w in workers(served) if w["state"] == "alive"])
    assert served.shows("NRestarts") == "1"


def test_stopped_it_is_killed_by_the_watchdog_and_started_again(served: Machine) -> None:
    before = served.shows("MainPID")
    served.run("kill", "-STOP", before)
    wait_for(
        lambda: served.shows("ActiveState") == "active" and served.shows("MainPID") not in ("0", before), 40
    )
    assert asked(served, "status") is not None
    assert served.shows("NRestarts") == "1"


def test_a_reload_is_told_and_a_broken_file_changes_nothing(served: Machine) -> None:
    before = served.shows("MainPID")
    served.systemctl("reload", "kvd")
    wait_for(lambda: served.shows("StatusText") == "settings reloaded")
    served.write("/etc/kvd/kvd.yaml", "liveness: [")
    served.systemctl("reload", "kvd")
    wait_for(lambda: served.shows("StatusText").startswith("NOT reloaded: /etc/kvd/kvd.yaml, line 1"))
    assert served.shows("MainPID") == before


def test_its_ledger_is_there_after_a_stop_and_its_sockets_are_not(served: Machine) -> None:
    assert served.run(PYTHON, "-c", RECORD).stdout == "Ok\n"
    served.systemctl("stop", "kvd")
    assert served.shows("Result") == "success"
    assert served.run("test", "-e", "/run/kvd").returncode == 1
    served.systemctl("start", "kvd")
    assert [transfer["transfer_id"] for transfer in asked(served, "transfers")["transfers"]] == ["t1"]
