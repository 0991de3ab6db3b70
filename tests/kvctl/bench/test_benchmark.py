"""`kvctl benchmark` from end to end: two real processes, real backends, every byte compared."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvctl.bench.measure import Sweep, measure
from kvctl.bench.pair import BackendRun
from kvctl.bench.sizing import sized
from kvctl.engines.sources import planned
from tests.kvctl.views.test_formats import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kvctl.conftest import Run

SMALL = ("-m", "llama-3.1-8b", "--local", "tp=8", "--remote", "tp=4", "--tokens", "64", "--rounds", "2")


def benchmark(*options: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvctl", "benchmark", *options],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def measured(*options: str) -> dict[str, Any]:
    done = benchmark(*SMALL, "--concurrency", "1", "-o", "json", *options)
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    check(document)
    return document


def ways(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(row["backend"], row["operation"], row["fragmentation"]) for row in document["measurements"]]


def test_direct_reads_in_every_fragmentation() -> None:
    document = measured("--backend", "direct")
    assert ways(document) == [("direct", "read", kind) for kind in ("contiguous", "runs-of-4", "random")]
    for row in document["measurements"]:
        assert row["verified"]
        assert row["bytes"] == 64 * 32 * 2 * 128 * 2  # tokens, layers, K and V, elements of one head, bytes
        assert list(row["stages"]) == ["plan", "prepare", "post", "wire", "complete"]
        assert {ceiling["name"] for ceiling in row["ceilings"]} == {"memcpy", "large", "tcp"}
        assert all(ceiling["ratio"] > 0 for ceiling in row["ceilings"])


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
def test_nixl_reads_and_writes_and_says_what_moved_the_bytes(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    document = measured("--backend", "nixl", "--fragmentation", "random", "--report", str(report))
    assert ways(document) == [("nixl", "read", "random"), ("nixl", "write", "random")]
    read, write = document["measurements"]
    assert read["transport"]
    # A window takes nothing over shared memory, so on one host it is on the slow path.
    assert write["transport"].startswith(("tcp", "5", "4"))
    assert "tcp/" in write["transport"]
    assert [warning["code"] for warning in document["warnings"]][-1] == "SLOW_PATH"
    page = report.read_text()
    assert page.count('<div class="bar">') == 2
    assert "SLOW_PATH" in page


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="Mooncake is not installed")
def test_mooncake_reads_and_writes() -> None:
    document = measured("--backend", "mooncake", "--fragmentation", "contiguous")
    assert ways(document) == [("mooncake", "read", "contiguous"), ("mooncake", "write", "contiguous")]


def test_what_the_time_is_too_short_for_is_left_out_and_named(tmp_path: Path) -> None:
    place = sized(planned("llama-3.1-8b", "tp=8"), planned("llama-3.1-8b", "tp=8"), (64,), (1,), 1 << 30)
    sweep = Sweep(place.sizes, ("contiguous", "random"), ("read",), rounds=5, seconds=1e-9)
    found = measure(place.scene, BackendRun("direct"), sweep, tmp_path, lambda _: None)
    assert [(row.fragmentation, row.rounds, row.verified) for row in found.rows] == [("contiguous", 1, True)]
    assert found.notes == [
        "direct reads after 64 tokens 1 at a time, contiguous: the 0.0 s for them were over (--quick)"
    ]


def test_a_table_with_bars_names_what_was_left_out() -> None:
    done = benchmark(*SMALL, "--backend", "direct", "--concurrency", "1,4", "--memory", "10MiB", "--plot")
    assert done.returncode == 0
    assert "SLOW_PATH" not in done.stdout
    assert "not measured: 64 tokens, 4 at a time: takes" in done.stdout
    assert "--memory allows 10.0 MiB" in done.stdout
    assert "█" in done.stdout


BAD: Sequence[tuple[tuple[str, ...], int, str]] = (
    ((), 2, "a pair has two engines, and 0 are named"),
    (("-m", "llama-3.1-8b", "decode-0"), 2, "two ways to say it"),
    (("--local", "tp=2"), 2, "give --model as well"),
    (("-m", "llama-3.1-8", "--quick"), 2, "llama-3.1-8b"),
    ((*SMALL, "--memory", "1MiB"), 1, "--memory allows 1.00 MiB"),
    ((*SMALL, "--memory", "much"), 2, "'much' is not a number of bytes above zero"),
    ((*SMALL, "--tokens", "0"), 2, "'0' is not a whole number above zero"),
    ((*SMALL, "--backend", "nxil"), 2, "nixl"),
    ((*SMALL, "--backend", "direct", "--operation", "write"), 1, "direct cannot write"),
    ((*SMALL, "--report", "/nonexistent/report.html"), 2, "/nonexistent is no folder"),
    (("llama-3.1-8b", "llama-3.1-70b", "--tokens", "64"), 1, "cannot read from"),
)


@pytest.mark.parametrize(("options", "code", "words"), BAD)
def test_bad_input_is_one_line_that_says_what_to_do(
    run: Run, options: tuple[str, ...], code: int, words: str
) -> None:
    done = run("benchmark", *options)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert done.err.startswith("kvctl: ")


def test_a_backend_that_does_not_open_is_told_with_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "nixl"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('nixl is broken here')\n")
    done = benchmark(*SMALL, "--backend", "nixl", environment={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("kvctl: the reader with nixl: ")


def test_ctrl_c_leaves_no_process_and_no_file_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvctl", "benchmark", *SMALL, "--backend", "direct", "--rounds", "100000"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        workers = running(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "")
    assert len(workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert list(tmp_path.iterdir()) == []


def running(process: subprocess.Popen[str]) -> list[int]:
    """The workers, once both have taken their memory and wait for the next order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        found = [int(pid) for pid in children.read_text().split()]
        if len(found) == 2 and all("kvctl.bench.worker" in title(pid) for pid in found):
            return found
    raise AssertionError(f"it ended with {process.returncode}")


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
