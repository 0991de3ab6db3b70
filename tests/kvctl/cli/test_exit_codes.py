"""How commands fail: the exit code, one line on stderr, nothing on stdout."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvctl.errors import EXIT_CODES
from kvd.wire.query import GetStatus, ListEngines
from kvd.wire.reply import Refused
from kvd.wire.transfer import ListTransfers
from tests.support.daemons import daemons, facts, session, worker

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

ASKING = ("engines", "workers", "transfers", "transfer x", "slow", "status", "events", "describe-topology")


def test_help_lists_every_exit_code(process: Run) -> None:
    outcome = process("--help")
    assert outcome.code == 0
    for code, meaning in EXIT_CODES:
        assert f"  {code:<4} {meaning}\n" in outcome.out


@pytest.mark.parametrize("command", ASKING)
def test_no_daemon_is_3_and_one_line_that_names_the_socket_and_what_to_do(
    process: Run, tmp_path: Path, command: str
) -> None:
    outcome = process(*command.split(), "--runtime-dir", tmp_path / "none")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.count("\n") == 1
    assert f"{tmp_path}/none/kvd.sock" in outcome.err
    assert "systemctl status kvd" in outcome.err


def test_a_socket_left_behind_by_a_dead_daemon_is_3_at_once(process: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "kvd.sock"))
    begin = time.monotonic()
    outcome = process("status", "--runtime-dir", tmp_path, "--timeout", "30")
    assert outcome.code == 3
    assert time.monotonic() - begin < 10
    assert "left behind" in outcome.err


def test_a_daemon_that_does_not_answer_is_3_within_the_timeout(process: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "kvd.sock"))
        stopped.listen()
        outcome = process("status", "--runtime-dir", tmp_path, "--timeout", "300ms")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.count("\n") == 1
    assert "did not answer within 0.3 s" in outcome.err


def test_a_refusal_is_5_with_the_daemons_code_and_hint(run: Run, daemon: FakeDaemon) -> None:
    del daemon.answers[ListEngines]
    outcome = run("engines", "-o", "json", "--socket", daemon.directory)
    error = json.loads(outcome.err)
    assert outcome.code == 5
    assert (error["code"], error["message"], error["hint"]) == ("KVD-NO", "not here", "ask another")


def test_another_answer_than_the_one_asked_for_is_3(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListEngines] = daemon.answers[GetStatus]
    outcome = run("engines", "--socket", daemon.directory)
    assert outcome.code == 3
    assert "kvd answered with status where engines was expected" in outcome.err


AS_NOBODY = """
import os, sys
from kvctl.main import main
main(["status", "--runtime-dir", "/nonexistent"])  # everything is imported now: nobody may not be able to
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(main(["status", "--runtime-dir", sys.argv[1]]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_locked_directory_is_6_and_says_who_may(daemon: FakeDaemon) -> None:
    daemon.directory.chmod(0o750)
    command = [sys.executable, "-c", AS_NOBODY, str(daemon.directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (6, "")
    [_, line] = done.stderr.splitlines()
    assert "is open to user root" in line
    assert "become" in line


def test_json_errors_are_json(process: Run, tmp_path: Path) -> None:
    for form in (("-o", "json"), ("--output=jsonl",), ("-ojson",)):
        outcome = process("engines", *form, "--runtime-dir", tmp_path / "none")
        error = json.loads(outcome.err)
        assert (error["kind"], error["schema_version"], error["exit_code"]) == ("Error", 1, outcome.code)
        assert set(error) == {"kind", "schema_version", "code", "message", "hint", "exit_code"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("engin",), ("'engin'", "did you mean engines")),
        (("engines", "--sate", "ready"), ("--sate", "--state")),
        (("engines", "--state", "redy"), ("'redy'", "did you mean ready")),
        (("engines", "-o", "jsn"), ("'jsn'", "did you mean json")),
        (("--color", "allways", "engines"), ("--color", "'allways'", "did you mean always")),
        (("engines", "--timeout", "soon"), ("--timeout", "'soon'", "500ms")),
        (("engines", "--timeout", "-1"), ("--timeout", "'-1'")),
        (("transfers", "--limit", "many"), ("--limit", "'many'")),
        (("engines", "--socket", "tcp://elsewhere:1"), ("--socket", "tcp://elsewhere:1")),
        (("engines", "--config", "/nonexistent.yaml"), ("--config", "/nonexistent.yaml")),
        (("completion", "tcsh"), ("'tcsh'", "bash, zsh, fish")),
        (("engines", "surplus"), ("surplus",)),
    ],
)
def test_wrong_usage_is_2_and_names_the_value_and_near_misses(
    run: Run, arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    for words in said:
        assert words in outcome.err


def test_an_interrupt_is_130_without_a_traceback(daemon: FakeDaemon) -> None:
    command = [sys.executable, "-m", "kvctl", "events", "--socket", str(daemon.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert "engine.ready" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=20)
    assert following.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_went_away_is_no_error(daemon: FakeDaemon) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvctl", "engines", "--socket", str(daemon.directory)]
    with os.fdopen(write, "wb") as broken:
        done = subprocess.run(
            command, stdout=broken, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_following_events_says_that_kvd_went_away_and_is_3_when_it_stays_away() -> None:
    with daemons() as (kvd,):
        command = [sys.executable, "-m", "kvctl", "events", "--timeout", "3", "--runtime-dir"]
        with subprocess.Popen(
            [*command, str(kvd.directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as following:
            assert following.stdout is not None
            for number in range(100):  # until the subscription has arrived
                with session(kvd, worker(facts(f"e{number}"))):
                    pass
                if select.select([following.stdout], [], [], 0.1)[0]:
                    break
            kvd.kill()
            _, err = following.communicate(timeout=30)
    assert following.returncode == 3
    assert err.splitlines()[0] == "kvctl: kvd went away; waiting for it to come back"
    assert "kvd went away and did not come back" in err.splitlines()[1]
    assert err.endswith(" [KVD-CTL-UNREACHABLE]\n")


@pytest.mark.parametrize("command", ["version", "--help", "schema HostKeys"])
def test_a_disk_that_is_full_is_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", *command.split()],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    said = "kvctl: cannot write the answer: No space left on device; make room, or write it elsewhere [KVD-CTL]\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_every_error_ends_with_its_code(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    del daemon.answers[ListEngines]
    for arguments, code in (
        (("engin",), "KVD-CTL-USAGE"),
        (("engines", "--sate", "ready"), "KVD-CTL-USAGE"),
        (("status", "--runtime-dir", tmp_path / "none"), "KVD-UNREACHABLE"),
        (("engines", "--socket", daemon.directory), "KVD-NO"),
    ):
        assert run(*arguments).err.endswith(f" [{code}]\n")


def test_kvctls_own_codes_say_what_kind_of_error_it_is(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    at = ("--socket", daemon.directory)
    pair = (tmp_path / "pair", "--list", tmp_path / "trusted")
    assert run("keys", "generate", "--key-file", *pair, *at).code == 0
    for arguments, code, exit_code in (
        (("trace", "export", "/dev/null", "--request", "none"), "KVD-CTL-CHECK", 1),
        (("describe-topology", "prefill-0", "decode-0"), "KVD-CTL-TIMEOUT", 4),
        (("keys", "generate", "--key-file", *pair), "KVD-CTL-REFUSED", 5),
    ):
        outcome = run(*arguments, *at)
        assert (outcome.code, outcome.err.endswith(f" [{code}]\n")) == (exit_code, True), outcome.err


def test_a_file_of_keys_that_may_not_be_written_is_6(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/etc/kvd/trusted")

    monkeypatch.setattr("kvctl.keys.trusting.listed", denied)
    key = "A" * 40
    outcome = run("keys", "trust", key, "a:1", "--list", tmp_path / "trusted")
    assert (outcome.code, outcome.err.endswith(" [KVD-CTL-PERMISSION]\n")) == (6, True), outcome.err


def test_a_ledger_that_is_away_is_1_since_nothing_was_refused_for_safety(
    run: Run, daemon: FakeDaemon
) -> None:
    daemon.answers[ListTransfers] = lambda _: Refused(
        code="KVD-LEDGER", message="away: no space", hint="see the disk"
    )
    outcome = run("transfers", "-o", "json", "--socket", daemon.directory)
    error = json.loads(outcome.err)
    assert (outcome.code, error["code"], error["exit_code"]) == (1, "KVD-LEDGER", 1)


@pytest.mark.parametrize("form", ["json", "jsonl", "yaml", "wide"])
def test_a_form_typed_as_an_option_is_told_the_option(run: Run, form: str) -> None:
    outcome = run("engines", f"--{form}")
    assert (outcome.code, f"did you mean -o {form}?" in outcome.err) == (2, True)
