"""`kvctl demo --simulate`: real daemons, processes and NIXL; the figures are right and nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from kvctl.demo.running import waves
from kvctl.demo.simulate import PROMPTS
from kvctl.views.registry import json_schema
from tests.support.daemons import wait_for

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

COMMAND = [sys.executable, "-m", "kvctl", "demo", "--simulate"]
PAGE = Path(__file__).parents[3] / "docs" / "demo.md"
STATE = 3 * 1024 * 2 + 4 * 128 * 128 * 4
ATTENTION_BLOCK = 640 * 2 * 2 * 64 * 2


@pytest.fixture
def place(temporary: Path) -> Iterator[Path]:
    """The folder for temporary files of a demo; afterwards it is empty and no process names it."""
    before = left_behind()
    yield temporary
    assert processes(temporary) == []
    assert list(temporary.iterdir()) == []
    # Tests that run at the same time have a segment for a moment before they map it, and after.
    wait_for(lambda: left_behind() <= before)


def left_behind() -> set[Path]:
    """Shared memory as UCX makes it that no process has mapped."""
    segments = set(Path("/dev/shm").glob("ucx*"))  # noqa: S108
    for entry in Path("/proc").iterdir():
        try:
            maps = (entry / "maps").read_text() if segments and entry.name.isdigit() else ""
        except OSError:
            continue
        segments = {path for path in segments if str(path) not in maps}
    return {path for path in segments if path.exists()}


def processes(folder: Path) -> list[str]:
    """Command lines of processes that were started with this folder for temporary files, a zombie's left out."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def start(place: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *options],
        env=os.environ | {"TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def without_times(text: str) -> list[str]:
    """The words of an answer, wherever its lines end, without times and rates."""
    return re.sub(r"\d[\d.]* ([um]?s|[KMG]iB/s)\b", "#", text).split()


@pytest.mark.usefixtures("place")
def test_the_transcript_in_docs_is_what_it_prints_but_for_times() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    page = PAGE.read_text()
    [block] = re.findall(r"^```text\n\$ kvctl demo --simulate\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    answer = "\n".join(line for line in block.splitlines() if not line.startswith(("+ ", "demo: ")))
    assert without_times(answer) == without_times(done.stdout)


def test_all_requests_come_out_right_and_the_figures_are_those_of_the_shape(place: Path) -> None:
    process = start(place, "-o", "json")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    document: dict[str, Any] = json.loads(out)
    jsonschema.Draft202012Validator(json_schema("Demo")).validate(document)
    assert (document["kind"], document["schema_version"], document["ok"]) == ("Demo", 1, True)
    assert (document["mode"], document["simulated"]) == ("pull", True)
    assert document["leases_released"] == len(PROMPTS) >= 5
    for request, tokens in zip(document["requests"], PROMPTS, strict=True):
        blocks = -(-(tokens - 1) // 640)
        assert request["bytes"] == 6 * STATE + 2 * blocks * ATTENTION_BLOCK
        assert (request["prompt_tokens"], request["external_tokens"]) == (tokens, tokens - 1)
        assert request["remote_ranks"] == ["tp0", "tp1"]
        assert request["transfer_seconds"] > 0
        assert (request["equal"], request["problem"]) == (True, "")
    assert [request["handshake_seconds"] > 0 for request in document["requests"]] == [True] + 5 * [False]
    (pair,) = document["topology"]["pairs"]
    assert pair["compatible"]
    assert (pair["local"]["tp"], pair["remote"]["tp"]) == (1, 2)
    assert [group["kind"] for group in pair["groups"]] == ["mamba", "mamba", "mamba", "full"]
    assert {(read["group"], *read["heads"]) for read in pair["reads"] if read["heads"]} == {
        (3, 0, 1),
        (3, 1, 2),
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["demo: starting two", "demo: starting 2", "demo: request 2"])
def test_an_interruption_ends_everything(place: Path, number: signal.Signals, moment: str) -> None:
    process = start(place)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(moment):
            break
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)  # impatience must not leave anything behind either
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.count("demo: ending all that was started") == 1


def test_kept_running_it_shows_commands_that_work_and_ends_with_ctrl_c(place: Path) -> None:
    process = start(place, "--keep")
    assert process.stderr is not None
    shown = []
    for line in process.stderr:
        if line.startswith("  kvctl "):
            shown.append(line.split()[1:])
        if line.startswith("Ctrl-C"):
            break
    outputs = {
        words[2]: subprocess.run(
            [sys.executable, "-m", "kvctl", *words], capture_output=True, text=True, check=True
        ).stdout
        for words in shown
        if "events" not in words
    }
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "6 of 6 requests came out right" in out
    assert outputs["transfers"].count("request-") >= 6
    assert "decode-engine (tp1" in outputs["describe-topology"]


def test_looped_it_sends_more_requests_than_its_engines_have_blocks_for_and_top_shows_them(
    place: Path,
) -> None:
    process = start(place, "--loop")
    assert process.stderr is not None
    where = next(line.split()[2] for line in process.stderr if line.startswith("  kvctl ") and " top" in line)

    def top() -> Any:
        ask = [sys.executable, "-m", "kvctl", "--runtime-dir", where, "top", "-o", "json"]
        return json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)

    shown = wait_for(lambda: one if len((one := top())["transfers"]) > 3 * len(PROMPTS) else None, 60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [pair["misses"] for pair in shown["pairs"]] == [0]
    assert shown["bytes_per_second"] > 0
    assert "requests were sent" in err


def test_a_killed_demo_takes_its_processes_along(place: Path) -> None:
    process = start(place)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("demo: request 1"):
            break
    assert len(processes(place)) == 8, (
        "two kvds, each with what compares engines for it, and three workers beside the demo"
    )
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 10
    while processes(place) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes(place) == []
    # Nobody was left to remove its folder.
    subprocess.run(["rm", "-r", *place.iterdir()], check=True)


def test_what_is_missing_is_a_wrong_usage_with_the_next_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl.demo.run.find_spec", lambda _: None)
    outcome = run("demo")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvctl: vLLM is not installed here; ")
    assert "--simulate" in outcome.err
    outcome = run("demo", "--simulate", "--backend", "mooncake")
    assert (outcome.code, outcome.out) == (2, "")
    assert "is not installed here; " in outcome.err


@pytest.mark.slow
def test_without_nixl_workers_read_each_other_directly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.demo.run.find_spec", lambda _: None)
    outcome = run("demo", "--simulate")
    assert outcome.code == 0
    assert "NIXL is not installed here" in outcome.err


def test_a_place_for_temporary_files_that_is_too_deep_for_sockets_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    outcome = run("demo", "--simulate", "--backend", "direct")
    assert (outcome.code, outcome.out) == (2, "")
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"kvctl: temporary files go to {deep}, whose path has {len(str(deep))} bytes")
    assert "set TMPDIR to a folder with a shorter path" in last
    assert list(deep.iterdir()) == []


def test_simulated_workers_do_not_push(run: Run) -> None:
    outcome = run("demo", "--simulate", "--mode", "push")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvctl: --simulate is pull only: ")


def test_an_unknown_mode_is_named(run: Run) -> None:
    outcome = run("demo", "--mode", "pusch")
    assert (outcome.code, outcome.out) == (2, "")
    assert "'pusch' is not one of pull, push; did you mean push?" in outcome.err


def test_the_first_request_shakes_hands_alone_and_later_ones_come_in_pairs() -> None:
    assert waves(6) == [[0], [1], [2, 3], [4, 5]]
    assert waves(5) == [[0], [1], [2, 3], [4]]
    assert waves(1) == [[0]]
