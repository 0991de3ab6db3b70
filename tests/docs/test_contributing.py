"""The guide in CONTRIBUTING.md names the files that existing commands, backends and messages are made of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.backends.registry import OFFERED
from tests.kvctl.test_adding import COMMAND, VIEW

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
LEAST_OF_CONTRACT = 9
"""Tests that each backend must pass."""
TEST_OF_COMMAND = """
from tests.kvctl.conftest import Run


def test_it_counts(run: Run) -> None:
    assert run("count-down", "--start", "1").out == "NUMBER\\n1\\n"
"""


def files(section: str) -> list[str]:
    """The files in the table of a section, in order."""
    body = GUIDE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", body, re.MULTILINE)
    return [path for row in rows for path in re.findall(r"`([^`]+)`", row) if "/" in path]


@pytest.mark.parametrize("command", ["engines", "status", "diff", "workers", "slow"])
def test_a_command_is_what_the_guide_says(command: str) -> None:
    made, view, test = (path.replace("NAME", command) for path in files("A command"))
    assert (ROOT / made).is_file()
    assert (ROOT / view).is_file()
    assert (ROOT / test).parent.is_dir()
    others = [path for path in (ROOT / "kvctl").rglob("*.py") if path != ROOT / made]
    assert [path for path in others if f"kvctl.commands.{command}" in path.read_text()] == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product and its tests, to which files are added as the guide says."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("kvctl", "daemon", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(checkout: Path, *words: str) -> str:
    """What Python prints there; it imports the copy, not this checkout."""
    paths = {"PYTHONPATH": f"{checkout}:{checkout / 'daemon'}"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=checkout,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def passed_tests(checkout: Path, *words: str) -> int:
    """How many tests passed there."""
    told = run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
    found = re.search(r"(\d+) passed", told)
    assert found is not None, told
    return int(found[1])


def test_a_command_takes_the_three_files_of_the_guide(checkout: Path) -> None:
    texts = (COMMAND, VIEW, TEST_OF_COMMAND)
    for path, text in zip(files("A command"), texts, strict=True):
        made = checkout / path.replace("NAME", "count_down")
        assert not made.exists()
        made.write_text(text.lstrip().replace("views.countdown", "views.count_down"))
    assert "  count-down  Numbers, one after the other.\n" in run(checkout, "-m", "kvctl", "--help")
    assert run(checkout, "-m", "kvctl", "count-down", "--start", "2") == "NUMBER\n2\n1\n"
    assert passed_tests(checkout, files("A command")[2].replace("NAME", "count_down")) == 1


def test_a_backend_takes_its_folder_and_one_line(checkout: Path) -> None:
    folder, registry, _page, _tests = files("A backend")
    shutil.copytree(ROOT / "tests/support/example_backend", checkout / folder.replace("NAME", "example"))
    before = (checkout / registry).read_text()
    line = '    "example": Adapter("kvd.backends.example.backend", measured=True, reads_only=True),\n'
    first = "ADAPTERS: dict[str, Adapter] = {\n"
    assert first in before
    (checkout / registry).write_text(before.replace(first, first + line))
    assert passed_tests(checkout, "tests/kvd/backends/test_contract.py", "-k", "example") >= LEAST_OF_CONTRACT
    assert "--backend example,nixl" in run(checkout, "-m", "kvctl", "benchmark", "--help")
    assert "example" in run(checkout, "-c", "from kvd.backends.registry import OFFERED; print(OFFERED)")


@pytest.mark.parametrize("backend", OFFERED)
def test_a_backend_is_what_the_guide_says(backend: str) -> None:
    folder, registry, page, tests = (path.replace("NAME", backend) for path in files("A backend"))
    assert (ROOT / folder / "backend.py").is_file()
    assert len(re.findall(rf'"kvd.backends.{backend}.backend"', (ROOT / registry).read_text())) == 1
    assert (ROOT / page).is_file() or backend == "auto"  # which has a part of direct's page
    assert (ROOT / tests).is_dir()
    outside = [path for path in (ROOT / "daemon").rglob("*.py") if not {backend, "auto"} & set(path.parts)]
    assert [p for p in outside if f"kvd.backends.{backend}.backend" in p.read_text()] == [ROOT / registry]


NAMES_A_BACKEND = {
    "daemon/kvd/worker/settings.py": "the default; what each is for, in a setting's text",
    "daemon/kvd/worker/stock.py": "vLLM's settings for Mooncake",
    "daemon/kvd/vllm/stock.py": "vLLM's kv_buffer_device is a staged engine here",
    "kvctl/doctor/host_checks.py": "what UCX, NIXL's engine, finds on a host",
    "kvctl/doctor/peer_reads.py": "what UCX, NIXL's engine, says of its transport",
    "kvctl/doctor/peer_transports.py": "reads what each backend tells of how it moves bytes",
    "kvctl/doctor/evidence.py": "packages, and nixl is one",
    "kvctl/engines/stock.py": "vLLM's stock connectors, which are called as the engines are",
    "kvctl/engines/probing.py": "the same",
    "kvctl/doctor/stock_checks.py": "the same",
    "kvctl/demo/run.py": "the demo's default, and what it says where that is not installed",
    "kvctl/bench/replay_run.py": "what a trace of several is replayed with",
    "kvctl/bench/handshake.py": "the backend that its cards are of",
}
"""Modules outside the backends' own that name one in code, with the reason."""


def test_no_other_module_asks_for_a_backend_by_its_name() -> None:
    named = re.compile(r"[=!]= \"(nixl|mooncake|direct|staged)\"|[({\[, =]\"(nixl|mooncake|direct|staged)\"")
    found = {
        str(path.relative_to(ROOT))
        for root in (ROOT / "daemon", ROOT / "kvctl")
        for path in root.rglob("*.py")
        if "backends" not in path.parts and named.search(path.read_text())
    }
    assert found == set(NAMES_A_BACKEND)


@pytest.mark.parametrize("family", ["lease", "push", "checksum", "order", "transfer"])
def test_a_message_is_what_the_guide_says(family: str) -> None:
    module, frame, _handlers, dispatch, *_rest = (
        path.replace("FAMILY", family) for path in files("A message")
    )
    assert (ROOT / module).is_file()
    families = re.search(r"^_FAMILIES = \((.*?)\)$", (ROOT / frame).read_text(), re.MULTILINE | re.DOTALL)
    assert families is not None
    assert family in re.findall(r"\w+", families.group(1))
    assert f"from kvd.wire.{family} import" in (ROOT / dispatch).read_text()


@pytest.mark.parametrize("section", ["A command", "A backend", "A message", "A kind of cache"])
def test_files_without_a_placeholder_are_there(section: str) -> None:
    named = [path for path in files(section) if not re.search("NAME|FAMILY", path)]
    assert [path for path in named if not (ROOT / path).exists()] == []
