"""The completion scripts are those that the command line would write now, and the shells take them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvctl import naming
from kvctl.cli import completion
from kvctl.cli.completion import SHELLS
from kvctl.cli.live_names import ASKED, offered
from kvctl.commands.completion import words
from kvctl.main import group
from kvd.wire.query import ListEngines
from tests.support.daemons import daemons

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

FOLDER = Path(__file__).parents[3] / "completions"
FILES = {"bash": "kvctl.bash", "zsh": "_kvctl", "fish": "kvctl.fish"}
"""The file that each shell looks for."""


def script(shell: str) -> str:
    return completion.script(shell, group(), words())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_in_the_repository_are_current(shell: str) -> None:
    assert (FOLDER / FILES[shell]).read_text() == script(shell), "run `make completions`"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_knows_every_command_and_choice(shell: str) -> None:
    text = script(shell)
    for row in group().rows:
        assert row.name in text
    for choice in ("jsonl", "always", "unreachable", "Topology"):
        assert choice in text


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_its_script(shell: str) -> None:
    if shell != "bash" and not shutil.which(shell):
        pytest.skip(f"{shell} is not installed; `.ci/setup shells` installs it, as root on Debian")
    subprocess.run([shell, "-n", FOLDER / FILES[shell]], check=True, capture_output=True)


def completed(line: str, path: Path | None = None) -> list[str]:
    """What bash offers at the end of ``line``; programs are looked for in ``path`` first."""
    words = line.split(" ")
    ask = (
        f"source {FOLDER / FILES['bash']}; COMP_WORDS=({' '.join(repr(word) for word in words)}); "
        f"COMP_CWORD={len(words) - 1}; _kvctl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        ["bash", "-c", ask],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {}),
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvctl eng", ["engines"]),
        ("kvctl -o json eng", ["engines"]),
        ("kvctl engines --sta", ["--state"]),
        ("kvctl engines --state re", ["ready"]),
        ("kvctl engines -o js", ["json", "jsonl"]),
        ("kvctl -o ya", ["yaml"]),
        ("kvctl schema Topo", ["Topology"]),
        ("kvctl completion z", ["zsh"]),
        ("kvctl engines --timeout 5 --lo", ["--local"]),
        ("kvctl workers --sort hea", ["heard"]),
        ("kvctl engines --sort gen", ["generation"]),
    ],
)
def test_what_bash_offers(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


# --- names that there are now ---


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A kvctl that knows some names, one of which would run a command where bash read it."""
    program = tmp_path / "kvctl"
    program.write_text(
        "#!/bin/sh\ncase $2 in\n"
        f"engines) printf '%s\\n' decode-0 decode-1 'x$(touch {tmp_path}/run)' ;;\n"
        "hosts) echo 10.0.0.8:7766 ;;\nleases) echo prefill-0/cmpl-1 ;;\nesac\necho oops >&2\n"
    )
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvctl workers --engine dec", ["decode-0", "decode-1"]),
        ("kvctl transfers -p decode-1", ["decode-1"]),
        ("kvctl drain dec", ["decode-0", "decode-1"]),
        ("kvctl describe-topology decode-0 decode-1", ["decode-1"]),
        ("kvctl --host 10", ["10.0.0.8:7766"]),
        ("kvctl doctor --peer 10", ["10.0.0.8:7766"]),
        ("kvctl leases release pre", ["prefill-0/cmpl-1"]),
        ("kvctl diff --ti", ["--timeout"]),
    ],
)
def test_names_are_asked_for_and_never_run(stub: Path, line: str, offered: list[str]) -> None:
    assert completed(line, stub) == offered
    assert not (stub / "run").exists()


def test_without_a_kvctl_nothing_is_offered_and_nothing_said(tmp_path: Path) -> None:
    program = tmp_path / "kvctl"
    program.write_text("#!/bin/sh\necho oops >&2\nexit 3\n")
    program.chmod(0o755)
    assert completed("kvctl workers --engine dec", tmp_path) == []


def answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *kinds: str) -> str:
    monkeypatch.setattr(naming, "within_seconds", lambda: None)
    assert naming.answer(list(kinds)) == 0
    written = capsys.readouterr()
    assert written.err == ""
    return written.out


def test_kvctl_tells_the_names_that_there_are(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(daemon.directory))
    assert answered(monkeypatch, capsys, "engines") == "decode-0\nprefill-1\nprefill-0\n"
    assert answered(monkeypatch, capsys, "leases") == "prefill-1/cmpl-4-p\n"
    assert answered(monkeypatch, capsys, "agents") == "prefill-0@5be0a431\nprefill-1@91c2d07e\n"
    assert answered(monkeypatch, capsys, "hosts") == "10.0.0.8:7766\n"


@pytest.mark.parametrize("kind", ["engines", "hosts", "leases", "nothing"])
def test_whatever_goes_wrong_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    for name, value in (("RUNTIME_DIR", tmp_path), ("TIMEOUT", "never"), ("CONFIG", tmp_path / "none")):
        monkeypatch.setenv(f"KVCTL_{name}", str(value))
        assert answered(monkeypatch, capsys, kind) == ""


def test_names_that_a_shell_would_read_are_not_offered() -> None:
    given = ["decode-0", "[::1]:7766", "a b", "$(x)", "-x", "a;b", "", "a`b`", "decode-0", "models/x@1"]
    assert offered(given).split("\n")[:-1] == ["decode-0", "[::1]:7766", "models/x@1"]


def test_a_kvd_that_does_not_answer_is_not_waited_for(daemon: FakeDaemon, process: Run) -> None:
    """The process ends by itself: without an end it would wait for as long as the operator lets kvctl wait."""
    daemon.answers[ListEngines] = lambda _: None
    environment = os.environ | {"KVCTL_RUNTIME_DIR": str(daemon.directory), "KVCTL_TIMEOUT": "10m"}
    outcome = process(ASKED, "engines", env=environment)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_a_stopped_kvd_is_not_waited_for(process: Run) -> None:
    """Its kernel takes the connection, so nothing but the end of the time ends the question."""
    with daemons() as [kvd]:
        kvd.signal(signal.SIGSTOP)
        environment = os.environ | {"KVCTL_RUNTIME_DIR": str(kvd.directory), "KVCTL_TIMEOUT": "10m"}
        outcome = process(ASKED, "engines", env=environment)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
