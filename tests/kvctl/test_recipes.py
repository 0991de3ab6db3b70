"""`-o name`, and the recipes of docs/cli.md: each does what it says on what kvctl prints."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().split("### Recipes\n")[1].split("\n## ")[0]
RECIPES = dict(re.findall(r"^\| ([^|`]+) \| `(.*)` \|$", PAGE.replace("\\|", "¦"), re.MULTILINE))


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("engines", ["decode-0", "prefill-1", "prefill-0"]),
        ("workers", ["decode-0/tp1", "decode-0/scheduler"]),
        ("transfers", ["3", "2", "1"]),
        ("transfers --by pair", ["prefill-1 to decode-0"]),
    ],
)
def test_lists_can_be_had_as_names(run: Run, daemon: FakeDaemon, command: str, names: list[str]) -> None:
    assert run(*command.split(), "-o", "name", "--socket", daemon.directory).out.splitlines() == names


def test_a_transfers_name_is_what_kvctl_transfer_takes(run: Run, daemon: FakeDaemon) -> None:
    newest, *_ = run("transfers", "-o", "name", "--socket", daemon.directory).out.split()
    assert "cmpl-3" in run("transfer", newest, "--socket", daemon.directory).out


def test_what_is_no_list_has_no_names(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("status", "-o", "name", "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (2, "")
    assert "'name' is not one of table, wide, json" in outcome.err


EXPECTED = {
    "engines that are not ready, and why": "prefill-0\t6 of 8 workers are missing\n",
    "memory that an engine registered": f"{24 << 30}\n",
    "workers that were silent for over 2 s": "4240\n",
    "bytes that were moved in the last hour": f"{2 * (64 << 20)}\n",
    "how much of the time went where, by pair": "decode-0\twire\t",
    "what kvd counts, by name": "handshakes.flights\t4\n",
    "what is in flight for over 10 s": "",
    "checks of doctor that failed": "",
    "events of leases, as they come": "2026-",
}


def test_every_recipe_is_tried() -> None:
    assert [name for name in RECIPES if name not in EXPECTED] == ["the timeline of each miss of today"]
    assert "-o name | xargs -rn1 kvctl transfer" in RECIPES["the timeline of each miss of today"].replace(
        "¦", "|"
    )


@pytest.mark.parametrize("wanted", EXPECTED)
def test_a_recipe_does_what_it_says(run: Run, daemon: FakeDaemon, wanted: str) -> None:
    typed, program = RECIPES[wanted].replace("¦", "|").split(" | jq ", 1)
    more = ("-n", "3", "--timeout", "5") if typed.startswith("kvctl events") else ()
    printed = run(*typed.split()[1:], *more, "--socket", daemon.directory).out
    fields = set(re.findall(r"\.([a-z_]+)", program.replace("@tsv", ""))) - {"key", "value"}
    assert {field for field in fields if f'"{field}"' not in printed} == set()
    jq = shutil.which("jq")
    if jq is None:
        pytest.skip("no jq here: only the names of the fields were looked at")
    option, _, quoted = program.partition(" ")
    done = subprocess.run(
        [jq, option, quoted.strip("'")], input=printed, capture_output=True, text=True, check=True
    )
    assert EXPECTED[wanted] in done.stdout
