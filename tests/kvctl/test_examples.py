"""Each command's help ends with lines to type: they are right, fit 80 columns, and stand in docs/cli.md."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvctl.cli.discovery import Row
from kvctl.cli.loading import load
from kvctl.cli.man import man_pages
from kvctl.cli.parsing import keys_as_values, watched
from kvctl.main import group

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def below(rows: tuple[Row, ...], *above: str) -> Iterator[tuple[str, Row]]:
    """All commands, with what is typed for each."""
    for row in rows:
        yield " ".join((*above, row.name)), row
        yield from below(row.rows, *above, row.name)


COMMANDS = dict(below(group().rows))
EXAMPLES: dict[str, tuple[str, ...]] = {
    name: import_module(row.module).EXAMPLES for name, row in COMMANDS.items()
}


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of each kvctl in a line of shell."""
    for part in re.split(r"[|>]+(?=[^']*(?:'[^']*'[^']*)*$)|<\(", line.partition("  # ")[0]):
        words = shlex.split(part.strip().removesuffix(")"))
        if "kvctl" in words:
            yield words[words.index("kvctl") + 1 :]


def parsed(command: Any, name: str, arguments: list[str]) -> None:
    """Have a command take its arguments, as far as it does before it runs; so the commands below it."""
    with command.make_context(name, arguments) as context:
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if rest and hasattr(command, "rows"):
            below_it, inner, others = command.resolve_command(context, rest)
            parsed(inner, str(below_it), others)
        else:
            assert not rest


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples_of_its_own_that_fit_a_line(name: str) -> None:
    examples = EXAMPLES[name]
    assert 1 <= len(examples) <= 3
    assert all(f"kvctl {name}" in line for line in examples)
    assert max(map(len, examples)) <= 78


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_each_example_is_taken(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    given = list(calls(line))
    assert given, line
    for arguments in given:
        if "xargs" in line and arguments[-1] == "--engine":
            arguments.append("decode-0")
        parsed(group(), "kvctl", keys_as_values(watched(arguments)))


def test_what_is_no_option_any_more_is_not_taken() -> None:
    with pytest.raises(Exception, match="--nope"):
        parsed(group(), "kvctl", ["engines", "--nope"])


def test_help_and_man_pages_end_with_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pages = man_pages(group(), "0")
    for name, lines in EXAMPLES.items():
        assert run(*name.split(), "--help").out.endswith(
            "\nExamples:\n" + "".join(f"  {line}\n" for line in lines)
        )
        assert ".SH EXAMPLES" in pages[f"kvctl-{name.replace(' ', '-')}.1"]


def test_the_page_shows_them_under_each_command() -> None:
    written = now = PAGE.read_text()
    for name, row in COMMANDS.items():
        if " " in name or name == "schema":
            continue
        lines = dict.fromkeys(line for _, one in below((row,)) for line in import_module(one.module).EXAMPLES)
        block = "```sh\n" + "".join(f"{line}\n" for line in lines) + "```\n\n"
        heading = re.compile(rf"(?<=^## kvctl {name}\n)\n?(?:```sh\n.*?^```\n\n)?", re.MULTILINE | re.DOTALL)
        assert heading.search(now), name
        now = heading.sub("\n" + block.replace("\\", r"\\"), now, count=1)
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(now)
    else:
        assert written == now


def test_a_command_is_loaded_with_its_examples() -> None:
    assert load(COMMANDS["engines"]).examples == EXAMPLES["engines"]
