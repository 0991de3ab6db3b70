"""The walks in docs/architecture.md: files that exist, in an order that goes down the floors."""

from __future__ import annotations

import ast
import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FLOORS = {
    "kvctl": 6, "kvd.service": 5, "kvd.vllm": 5, "kvd.worker": 4, "kvd.trace": 3, "kvd.client": 3, "kvd.backends": 3,
    "kvd.keys": 2, "kvd.weights": 2, "kvd.wire": 2, "kvd.topology": 2, "kvd.geometry": 1, "kvd.zmtp": 1,
}  # fmt: skip
MOST = 12


def walks() -> dict[str, list[list[str]]]:
    """The files of each walk, one list for each process that it goes through."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^### ", PAGE.split("## Three walks")[1].split("\n## ")[0], flags=re.MULTILINE)[
        1:
    ]:
        title, body = section.split("\n", 1)
        parts: list[list[str]] = [[]]
        for process, path in re.findall(r"^\|(?: ([a-z ]*?) ?\|)? `([\w/]+\.py)` \|", body, re.MULTILINE):
            if process and parts[-1]:
                parts.append([])
            parts[-1].append(path)
        found[title] = parts
    return found


WALKS = walks()


def module(path: str) -> str:
    return path.removeprefix("daemon/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def floor(path: str) -> int:
    return next(level for package, level in FLOORS.items() if f"{module(path)}.".startswith(f"{package}."))


def imported(path: str) -> set[str]:
    """Every module that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_there_are_three_walks_of_few_files() -> None:
    assert len(WALKS) == 3
    assert [sum(map(len, parts)) for parts in WALKS.values() if not 4 <= sum(map(len, parts)) <= MOST] == []
    assert [len(parts) for parts in WALKS.values()] == [1, 3, 1]


PARTS = [
    pytest.param(part, id=f"{title}-{n}") for title, parts in WALKS.items() for n, part in enumerate(parts)
]


@pytest.mark.parametrize("part", PARTS)
def test_the_files_are_there(part: list[str]) -> None:
    assert [path for path in part if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("part", PARTS)
def test_a_walk_goes_down_the_floors(part: list[str]) -> None:
    assert [(one, other) for one, other in pairwise(part) if floor(other) > floor(one)] == []


@pytest.mark.parametrize("part", PARTS)
def test_no_file_imports_one_that_was_opened_before(part: list[str]) -> None:
    assert [(other, one) for one, other in combinations(part, 2) if module(one) in imported(other)] == []


def test_the_table_of_floors_is_the_one_that_is_tested() -> None:
    rows = re.findall(r"^\| (\d) \| `([a-z.]+)` \|", PAGE, re.MULTILINE)
    assert {package: int(level) for level, package in rows} == FLOORS
