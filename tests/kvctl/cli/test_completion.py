"""The completion scripts are those that the command line would write now, and the shells take them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvctl.cli import completion
from kvctl.cli.completion import SHELLS
from kvctl.commands.completion import words
from kvctl.main import group

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


def completed(line: str) -> list[str]:
    """What bash offers at the end of ``line``."""
    words = line.split(" ")
    ask = (
        f"source {FOLDER / FILES['bash']}; COMP_WORDS=({' '.join(repr(word) for word in words)}); "
        f"COMP_CWORD={len(words) - 1}; _kvctl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
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
    ],
)
def test_what_bash_offers(line: str, offered: list[str]) -> None:
    assert completed(line) == offered
