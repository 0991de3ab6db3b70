"""The guide in CONTRIBUTING.md names the files that existing commands, backends and messages are made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


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


@pytest.mark.parametrize("backend", ["nixl", "mooncake", "direct", "staged", "auto"])
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
