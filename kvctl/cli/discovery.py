"""Finds commands by reading the sources of a package, so that `kvctl --help` lists them without importing any.

Each module that declares a ``SECTION`` is a command. The command has the module's name, with dashes. The function of
that name runs it. The first line of that function's docstring is the command's line in the list, and the module's
``EXAMPLES`` end its help. A package is a group of the commands in it; one without a ``SECTION`` is a room only, whose
commands stand beside those outside. The underscore at the end of a name is there for Python alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SECTIONS = ("Look", "Compare engines", "Measure", "Try faults", "Set up", "About kvctl")
"""In the order in which they are listed; others come behind."""
_SECTION = re.compile(r'^SECTION = "(.+)"$', re.MULTILINE)


class Row(NamedTuple):
    """One command: its name, the module that has it, the line in the list of commands, the list's section.

    ``rows`` are the commands below it, where it is a group; its function says what they are about, or is a command.
    """

    name: str
    module: str
    summary: str
    section: str
    rows: tuple[Row, ...] = ()


def commands(package: str, folders: Iterable[str]) -> tuple[Row, ...]:
    """The commands of a package that lies in these folders, section by section and by name."""
    found = (row for folder in folders for path in Path(folder).iterdir() for row in _row(package, path))
    return tuple(sorted(found, key=lambda row: (*_place(row.section), row.name)))


def _row(package: str, path: Path) -> Iterable[Row]:
    name, group = path.stem, path / "__init__.py"
    source = group if group.exists() else path
    if source.suffix != ".py" or name == "__init__":
        return
    text = source.read_text(encoding="utf-8")
    section = _SECTION.search(text)
    if source is group and not section:
        yield from commands(f"{package}.{name}", [str(path)])
    summary = re.search(rf'^def {name}\(.*?"""(.+?)(?:"""|\n)', text, re.MULTILINE | re.DOTALL)
    if section and summary:
        module = f"{package}.{name}"
        below = commands(module, [str(path)]) if source is group else ()
        yield Row(called(name), module, summary.group(1), section.group(1), below)


def called(name: str) -> str:
    """What an operator types for the module of that name."""
    return name.rstrip("_").replace("_", "-")


def _place(section: str) -> tuple[int, str]:
    return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS), section
