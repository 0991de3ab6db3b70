"""The examples in docs/cli.md are what the program prints."""

from __future__ import annotations

import os
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvctl.commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kvctl.conftest import FakeDaemon, Run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """What stands on the screen after a command line was typed."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr("kvctl.render.numbers.now", lambda: datetime(2026, 11, 18, 11, 10, tzinfo=UTC))

    def typed(line: str) -> str:
        arguments = shlex.split(line)[1:]
        if "--runtime-dir" not in arguments:
            arguments = ["--runtime-dir", str(daemon.directory), *arguments]
        outcome = run(*arguments)
        return outcome.out + outcome.err

    return typed


def test_every_example_is_what_the_program_prints(example: Callable[[str], str]) -> None:
    def printed(block: re.Match[str]) -> str:
        lines = [line for line in block.group().splitlines() if line.startswith("$ ")]
        return "\n".join(f"{line}\n{example(line[2:])}" for line in lines)

    written = PAGE.read_text()
    now = BLOCK.sub(printed, written)
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(now)
    else:
        assert written == now


def test_every_command_has_a_section() -> None:
    written = PAGE.read_text()
    for row in COMMANDS:
        assert f"\n## kvctl {row.name}\n" in written or row.name == "schema"
