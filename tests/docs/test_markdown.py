"""The pages are written so that the site draws them as a reader of the file sees them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"\||[-*] |\d{1,2}\. ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_and_lists_begin_after_an_empty_line(page: Path) -> None:
    """Else the site draws them as a part of the paragraph before."""
    inside, before, wrong = False, "", []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        inside ^= line.startswith("```")
        begins = BLOCK.match(line) and not BLOCK.match(before) and not before.startswith(" ")
        if not inside and begins and before.strip() and not before.startswith(("<!--", "#")):
            wrong.append(f"{number}: {line[:60]}")
        before = line
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_table_has_a_header(page: Path) -> None:
    """An empty line within a table cuts its last rows off, which the site then draws as text."""
    inside, wrong = False, []
    lines = ["", *page.read_text().splitlines(), ""]
    for number, (before, line, after) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), 1):
        inside ^= line.startswith("```")
        if not inside and line.startswith("|") and not before.startswith("|") and not after.startswith("|-"):
            wrong.append(f"{number}: {line[:60]}")
    assert wrong == []
