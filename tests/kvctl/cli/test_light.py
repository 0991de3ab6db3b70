"""The command line is light: nothing heavy is imported before it is needed."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest

from kvctl.cli.discovery import Row
from kvctl.main import group

COMMANDS: tuple[Row, ...] = group().rows

HEAVY = {"torch", "vllm", "nixl", "mooncake", "transformers", "textual"}
LOADED = """
import json, sys
from kvctl.main import main
sys.stdout = open("/dev/null", "w")
main({arguments!r})
print(json.dumps(sorted(sys.modules)), file=sys.__stdout__)
"""


def modules(*arguments: str) -> set[str]:
    script = LOADED.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_help_imports_no_command_and_none_of_their_libraries() -> None:
    loaded = modules("--help")
    assert not loaded & (HEAVY | {"numpy", "zmq", "msgspec", "yaml", "pydantic", "rich.console"})
    others = ("kvctl.commands.", "kvd.", "kvctl.demo")
    assert {name for name in loaded if name.startswith(others)} <= {"kvd.errors"}  # it imports nothing


def test_describe_topology_imports_no_engine_and_no_backend() -> None:
    loaded = modules("describe-topology", "--runtime-dir", "/nonexistent")
    assert "kvd.topology.describe" in loaded
    assert not loaded & HEAVY


def test_planning_without_a_kvd_imports_no_sockets_and_no_pydantic() -> None:
    loaded = modules("describe-topology", "--model", "qwen3-32b", "--remote", "tp=2", "-o", "json")
    assert "kvd.topology.plan" in loaded
    assert not loaded & (HEAVY | {"zmq", "pydantic", "rich.console", "ssl"})


PLANNING = ("describe-topology", "diff", "export-geometry")


@pytest.mark.parametrize("command", [row.name for row in COMMANDS if row.name not in PLANNING])
def test_no_other_command_imports_numpy(command: str) -> None:
    assert not modules(command, "--help") & (HEAVY | {"numpy"})


EVERY = [row for command in COMMANDS for row in (command, *command.rows)]


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_the_line_in_the_list_is_the_first_of_the_commands_own_help(row: Row) -> None:
    function = row.module.rpartition(".")[2]
    documented = inspect.getdoc(getattr(importlib.import_module(row.module), function)) or ""
    assert documented.splitlines()[0] == row.summary
