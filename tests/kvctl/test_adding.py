"""A command takes three files: the command, its view and their test. Nothing else names it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvctl.commands
import kvctl.views

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

COMMAND = '''
"""`kvctl count-down`."""

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.views.countdown import Countdown
from kvctl.views.output import show

SECTION = "Look"
EXAMPLES = ("kvctl count-down --start 5",)


def count_down(
    settings: Settings,
    *,
    start: Annotated[int, typer.Option("--start", metavar="N", help="Where to begin.")] = 3,
) -> None:
    """Numbers, one after the other."""
    show(Countdown(numbers=tuple(range(start, 0, -1))), settings)
'''
VIEW = '''
"""The Countdown document."""

from msgspec import Struct

from kvctl.views.registry import View
from kvctl.views.screen import Column, table


class Countdown(Struct, frozen=True, kw_only=True):
    """Numbers on their way to zero."""

    numbers: tuple[int, ...]


def countdown_screen(body, wide):
    """One number a line."""
    return table(body.numbers, Column("NUMBER", lambda number: number))


VIEWS = (View(Countdown, countdown_screen),)
'''


@pytest.fixture(autouse=True)
def _added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder beside each package, with one file more."""
    for package, name, text in (
        (kvctl.commands, "count_down", COMMAND),
        (kvctl.views, "countdown", VIEW),
    ):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{name}.py").write_text(text.lstrip())
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield
    for name in ("kvctl.commands.count_down", "kvctl.views.countdown"):
        sys.modules.pop(name, None)


def test_the_list_of_commands_has_it(run: Run) -> None:
    assert "  count-down  Numbers, one after the other.\n" in run("--help").out


def test_it_runs_and_prints_its_document_in_every_form(run: Run) -> None:
    assert run("count-down", "--start", "2").out == "NUMBER\n2\n1\n"
    document = json.loads(run("count-down", "-o", "json").out)
    assert document == {"kind": "Countdown", "schema_version": 1, "numbers": [3, 2, 1]}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_it_with_its_options(run: Run, shell: str) -> None:
    script = run("completion", shell).out
    assert "count-down" in script
    assert ("-l start" if shell == "fish" else "--start") in script


def test_its_document_has_a_schema(run: Run) -> None:
    assert "Countdown           Numbers on their way to zero.\n" in run("schema").out
    assert json.loads(run("schema", "countdown").out)["title"] == "Countdown"


def test_a_folder_without_a_section_is_no_group_of_commands(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "more" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text('"""A room."""\n')
    (room / "count_up.py").write_text(COMMAND.lstrip().replace("count_down", "count_up"))
    monkeypatch.setattr(kvctl.commands, "__path__", [*kvctl.commands.__path__, str(room.parent)])
    listed = run("--help").out
    assert "  count-up  " in listed
    assert "room" not in listed
    assert run("count-up", "--start", "1").out == "NUMBER\n1\n"
    sys.modules.pop("kvctl.commands.room.count_up", None)
