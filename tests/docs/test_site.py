"""The site's parts, that README leads to all of them, and that what is quoted as output can still be printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PARTS = ("start", "operate", "troubleshoot", "reference", "security", "explain", "laboratory")
"""In the order in which a reader needs them."""
OUTPUT = re.compile(r"^```text\n(\$ kvctl (?!demo --simulate).*?)^```$", re.MULTILINE | re.DOTALL)
"""What real engines answered, with other times at each run. Tests elsewhere compare all other outputs word for word."""
HEADER = re.compile(r"^[A-Z][A-Z0-9/-]+(?: +[A-Z][A-Z0-9/-]+)+ *$", re.MULTILINE)


class _Site(yaml.SafeLoader):
    """mkdocs.yml, in which one entry names a Python function."""


_Site.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def nav() -> dict[str, list[str]]:
    """The pages of each part, by the part's name in small letters."""
    found = yaml.load((ROOT / "mkdocs.yml").read_text(), _Site)["nav"]  # noqa: S506 (a SafeLoader)
    return {name.lower(): list(_pages(below)) for part in found for name, below in part.items()}


def _pages(below: Any) -> Iterator[str]:
    if isinstance(below, str):
        yield below
    else:
        for one in below:
            yield from _pages(next(iter(one.values())) if isinstance(one, dict) else one)


def readme() -> dict[str, list[str]]:
    """The same of README's table: a cell without a part goes on with the one above it."""
    parts: dict[str, list[str]] = {}
    part = ""
    for line in (ROOT / "README.md").read_text().partition("\n## Read on\n")[2].splitlines():
        if cells := re.fullmatch(r"\| (\w*) ?\| (.*) \| (.*) \|", line):
            part = cells[1] or part
            parts.setdefault(part, []).extend(re.findall(r"\]\(([\w/.-]+\.md)\)", f"{cells[2]} {cells[3]}"))
    parts.pop("part", None)
    return parts


def as_on_the_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else path.lower()


def test_the_site_has_its_parts_in_order_and_each_page_once() -> None:
    parts = nav()
    assert tuple(parts) == PARTS
    pages = [page for part in parts.values() for page in part]
    assert len(pages) == len(set(pages))
    assert {page for page in pages if not (ROOT / "docs" / page).exists()} == {
        "index.md", "changelog.md", "contributing.md",
    }  # fmt: skip


def test_readme_leads_to_every_page_under_the_part_where_the_site_has_it() -> None:
    site = {part: set(pages) - {"index.md"} for part, pages in nav().items()}
    assert {part: set(map(as_on_the_site, pages)) for part, pages in readme().items()} == site


def test_what_why_and_status_fit_one_screen_before_anything_is_typed() -> None:
    first = (ROOT / "README.md").read_text().partition("\n## From nothing to a pair\n")[0]
    assert len(first.splitlines()) <= 30
    for never_run in ("RDMA", "two real machines", "real weights"):
        assert re.search(rf"^\| never run \| .*{never_run}", first, re.MULTILINE)


def transcripts() -> list[Any]:
    return [
        pytest.param(found, id=f"{page.name}-{number}")
        for page in sorted(ROOT.glob("docs/**/*.md"))
        for number, found in enumerate(OUTPUT.findall(page.read_text()))
    ]


@pytest.mark.parametrize("transcript", transcripts())
def test_tables_in_transcripts_have_the_columns_that_the_program_prints(transcript: str) -> None:
    golden = "".join(path.read_text() for path in sorted(ROOT.glob("tests/golden/*.txt")))
    printed = {tuple(line.split()) for line in HEADER.findall(golden)}
    assert {header for header in HEADER.findall(transcript) if tuple(header.split()) not in printed} == set()
