"""Man pages on a terminal: lines are not stretched, and end between the choices of an option."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from kvctl.cli.man import man_pages
from kvctl.main import group


def test_lines_end_where_they_may_and_are_not_spread() -> None:
    for name, page in man_pages(group(), "0").items():
        head, _, options = page.partition(".SH OPTIONS")
        assert ".ad l" in head.splitlines()[1], name
        signatures = [
            line for line in options.partition(".SH EXAMPLES")[0].splitlines() if line.startswith("\\fB")
        ]
        assert not [line for line in signatures if re.search(r"\|(?!\\:)", line)], name


def test_a_page_fits_a_terminal_of_60_columns() -> None:
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("groff is not installed")
    page = man_pages(group(), "0")["kvctl-engines.1"]
    done = subprocess.run(
        [groff, "-man", "-Tascii", "-P-cbou", "-rLL=60n"],
        input=page,
        capture_output=True,
        text=True,
        check=True,
    )
    options = done.stdout.partition("OPTIONS")[2].partition("EXAMPLES")[0]
    assert "jsonl|" in options
    assert max(map(len, options.splitlines())) <= 60
    assert not [line for line in options.splitlines() if re.search(r"\w  +\w", line.strip())]
