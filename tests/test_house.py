"""The shape of the house: files that can be read at one sitting, rooms that can be seen at a glance, one name each."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.support.daemons import ROOT

MOST_LINES = 400
MOST_MODULES = 25
TWICE: dict[str, str] = {}
"""Class names that may stand in two places, with the reason."""


def modules() -> list[Path]:
    """Every module of the product."""
    found = [path for top in ("kvctl", "daemon") for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(found) > 300
    return found


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in modules()
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_no_folder_has_more_modules_than_can_be_seen_at_once() -> None:
    """Each file is a module that is read, ``__init__.py`` too: it says what its room is about."""
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in modules())
    assert counts["daemon/kvd/worker"] > 10
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in TWICE} == {}
