"""The page about security names the tests that hold what it says."""

from __future__ import annotations

import re

from tests.support.daemons import ROOT


def test_every_test_that_the_page_names_is_one() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/security.md").read_text()))
    assert len(named) > 90
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert named <= there, f"no tests: {sorted(named - there)}"
