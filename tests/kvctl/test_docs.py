"""Examples in docs/ and files in tests/golden are what the program prints, and the pages tell of all that there is."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvctl.cli.settings import OutputFormat, Settings
from kvctl.commands.setting_up import install_files
from kvctl.engines.options import option_names
from kvctl.explained.entries import Kind, entries
from kvctl.main import group
from kvctl.views.output import show
from kvd.keys import read_pair
from tests.kvctl.conftest import SINCE
from tests.kvctl.golden_documents import DOCUMENTS
from tests.kvctl.golden_lines import HELP, LINES, SCREENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kvctl.conftest import FakeDaemon, Run

DOCS = Path(__file__).parents[2] / "docs"
GOLDEN = Path(__file__).parents[1] / "golden"
TOPOLOGY = Path(__file__).parents[2] / "daemon" / "kvd" / "topology"
FINDINGS = (TOPOLOGY / "findings.py", TOPOLOGY / "stock" / "findings.py")
SLOW = Path(__file__).parents[2] / "kvctl" / "ledger" / "slow_findings.py"
ABOUT_CODES = """`kvctl explain CODE` prints what stands here. An error of kvctl ends with its code in brackets; kvd's
log, `kvctl doctor`, `slow`, `describe-topology` and `transfers` show theirs. Each code has the test that brings its
situation about. No code at all? [Symptoms](symptoms.md). This page is made of `kvctl/explained`; do not edit it by
hand."""
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""In the place of a key that was made."""
COMMAND = re.compile(r"kvctl |systemctl |kvd --")
"""What is never broken, however narrow the terminal."""
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """What stands on the screen after a command line was typed."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr("kvctl.cli.numbers.now", lambda: datetime(2026, 11, 18, 11, 10, tzinfo=UTC))

    def typed(line: str) -> str:
        arguments = shlex.split(line)[1:]
        if "--runtime-dir" not in arguments:
            arguments = ["--runtime-dir", str(daemon.directory), *arguments]
        outcome = run(*arguments)
        return outcome.out + outcome.err

    return typed


@pytest.mark.parametrize(
    "page", [DOCS / "cli.md", DOCS / "topology.md", DOCS / "transfers.md"], ids=lambda page: page.name
)
def test_every_example_is_what_the_program_prints(example: Callable[[str], str], page: Path) -> None:
    def printed(block: re.Match[str]) -> str:
        lines = [line for line in block.group().splitlines() if line.startswith("$ ")]
        return "\n".join(f"{line}\n{example(line[2:])}" for line in lines)

    written = page.read_text()
    now = BLOCK.sub(printed, written)
    if os.environ.get("WRITE_DOCS"):
        page.write_text(now)
    else:
        assert written == now


def page_of_codes() -> str:
    """docs/codes.md, of the texts that `kvctl explain` prints."""
    lines = ["# Codes", "", ABOUT_CODES]
    of: Kind | None = None
    for kind, code, text in entries():
        if kind is not of:
            lines += ["", f"## {kind.heading}"]
        of = kind
        parts = (("Cause", text.cause), ("Look at", text.evidence), ("Do", text.next))
        lines += ["", f"### `{code}`", "", f"{text.says[0].upper()}{text.says[1:]}.", ""]
        lines += [f"- **{name}**: {told}" for name, told in parts]
        lines += [f"- **Test**: `{text.test}`"] if text.test else []
    return "\n".join(lines) + "\n"


def test_the_page_of_codes_has_the_texts_that_explain_prints() -> None:
    page = DOCS / "codes.md"
    if os.environ.get("WRITE_DOCS"):
        page.write_text(page_of_codes())
    else:
        assert page.read_text() == page_of_codes()


def kept(path: Path, printed: str) -> None:
    """Compare with a file, or with WRITE_DOCS write it."""
    if os.environ.get("WRITE_DOCS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(printed)
    assert path.read_text() == printed


def steady(text: str, folder: Path, runtime_dir: Path) -> str:
    """Text with nothing in it that is another one at each run: folders, keys that were made, how long was waited.

    Nor how many pages there are: a page more is no news of `kvctl install-files`.
    """
    text = text.replace(str(runtime_dir), "/run/kvd").replace(f"{folder.parent}/config", "~/.config")
    text = re.sub(r"(?<=made      )[1-9][0-9](?=\n)", " N", text)
    pair = folder / "host.keys"
    if pair.exists():
        text = text.replace(read_pair(pair).public.decode(), KEY)
    text = re.sub(r"(?<=after )[0-9.]+ [mu]?s", "1.00 ms", text)
    if '"kind": "Wait"' in text:
        text = re.sub(r'(?<="seconds": )[0-9.e-]+', "0.001", text)
    return text.replace(f"{folder}/", "").replace(platform.python_version(), "3.11.2")


@pytest.mark.parametrize("name", LINES)
def test_answers_are_the_golden_ones_on_terminals_and_in_a_pipe(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Files that a line writes lie in a folder of its screen, so that the next screen finds what the first one did."""
    monkeypatch.setattr("kvctl.cli.numbers.now", lambda: datetime(2026, 11, 18, 11, 10, tzinfo=UTC))
    monkeypatch.setattr("kvctl.commands.version.own_version", lambda: "0.1.0")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("KVCTL_TRACES", "traces")
    # It starts kvd twice, which takes a second of a core for each screen.
    monkeypatch.setattr(install_files, "_page_of_kvd", cache(install_files._page_of_kvd))
    parts = []
    for line in LINES[name]:
        seen: dict[str, str] = {}
        for screen, width in SCREENS.items():
            monkeypatch.setenv("COLUMNS", str(width or 80))
            monkeypatch.setattr(sys.stdout, "isatty", lambda width=width: width is not None)
            (tmp_path / screen).mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / screen)
            where = ("--color", "never", "--runtime-dir", daemon.directory)
            outcome = run(*where, *shlex.split(line))
            for written in (tmp_path / screen).rglob("*"):
                os.utime(written, (SINCE, SINCE))
            out, err = (
                steady(text, tmp_path / screen, daemon.directory) for text in (outcome.out, outcome.err)
            )
            text = f"{out}--- stderr\n{err}--- exit {outcome.code}\n"
            seen.setdefault(text, screen)
            if seen[text] != screen:
                text = f"as on {seen[text]}\n"
            parts.append(f"=== kvctl {line}   ({screen})\n{text}")
    kept(GOLDEN / f"{name}.txt", "".join(parts))


def test_every_command_has_golden_answers() -> None:
    assert {row.name for row in group().rows} - set(LINES) == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_of_other_hosts_are_the_golden_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What depends on the host, or takes long, as it would be printed."""
    monkeypatch.setattr("kvctl.cli.numbers.now", lambda: datetime(2026, 11, 18, 11, 10, tzinfo=UTC))
    monkeypatch.setenv("TERM", "xterm")
    parts = []
    # Each of 500 rows in its own line is nothing to read: of the long one only what is folded is kept.
    forms: tuple[OutputFormat, ...] = ("folded",) if name == "engines" else ("table", "wide")
    for form in forms:
        for screen, width in SCREENS.items():
            monkeypatch.setenv("COLUMNS", str(width or 80))
            monkeypatch.setattr(sys.stdout, "isatty", lambda width=width: width is not None)
            show(DOCUMENTS[name], Settings(output=form, color="never"))
            parts.append(f"=== {name} -o {form}   ({screen})\n{capsys.readouterr().out}")
            narrow = [line for line in parts[-1].splitlines() if len(line) > 80 and not COMMAND.search(line)]
            assert form == "wide" or width != 80 or narrow == []
    kept(GOLDEN / f"document-{name}.txt", "".join(parts))


def test_help_is_the_golden_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    helps = ((name, run(*name.split(), "--help").out) for name in HELP)
    kept(GOLDEN / "help.txt", "".join(f"=== kvctl {name} --help\n{text}" for name, text in helps))


def test_every_command_has_a_section() -> None:
    written = (DOCS / "cli.md").read_text()
    for row in group().rows:
        assert f"\n## kvctl {row.name}\n" in written or row.name == "schema"
        for below in row.rows:
            assert f"kvctl {row.name} {below.name}" in written


def test_every_engine_option_is_explained() -> None:
    table = (DOCS / "topology.md").read_text().split("## What the picture says")[0]
    assert {name for name in option_names() if f"`{name}`" not in table} == set()


def test_every_finding_of_slow_is_explained() -> None:
    written = (DOCS / "transfers.md").read_text()
    codes = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)*)", "(?:warning|info)"', SLOW.read_text()))
    assert len(codes) >= 10
    assert {code for code in codes if f"`{code}`" not in written} == set()


def test_every_finding_is_explained() -> None:
    written = (DOCS / "topology.md").read_text()
    codes = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', "".join(path.read_text() for path in FINDINGS)))
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in written} == set()
