"""Modules, files and commands that the docs name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = "daemon|kvctl|tests|benchmarks|configs|docs|examples|completions|kvd"
VLLMS = ("tests/v1/", "examples/disaggregated/")
"""Where paths begin that are in vLLM's own repository."""


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def has_module(name: str) -> bool:
    """Whether a dotted name is a module, or begins with one that mentions the name behind it."""
    root = ROOT / ("daemon" if name.startswith("kvd.") else "")
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        path = root.joinpath(*parts[:end])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            return end == len(parts) or re.search(rf"\b{parts[end]}\b", file.read_text()) is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    names = {span for span in spans(page) if re.fullmatch(r"kv(d|ctl)(\.[a-zA-Z_]+)+", span)}
    names -= {name for name in names if name.endswith((".yaml", ".sock", ".lock", ".service"))}
    paths = {span for span in spans(page) if re.fullmatch(rf"({FOLDERS})/[a-z0-9_./-]+\.[a-z]+", span)}
    paths = {path for path in paths if not path.startswith(VLLMS)}
    roots = (ROOT, ROOT / "daemon")
    assert {name for name in names if not has_module(name)} == set()
    assert {path for path in paths if not any((root / path).exists() for root in roots)} == set()


def test_pages_that_the_code_names_are_there() -> None:
    sources = [
        path
        for folder in ("kvctl", "daemon", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = {page for path in sources for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}
    assert len(named) > 10
    assert {page for page in named if not (ROOT / page).is_file()} == set()
