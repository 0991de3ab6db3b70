"""The check of the built site finds what is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "site_links.py"


def checked(folder: Path, body: str, head: str = "") -> tuple[int, str]:
    (folder / "other.html").write_text('<h2 id="there">x</h2>')
    (folder / "page.html").write_text(f"<html><head>{head}</head><body>{body}</body></html>")
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_good_site_passes_and_external_links_are_not_followed(tmp_path: Path) -> None:
    body = '<a href="other.html#there">x</a> <a href="https://example.invalid/">x</a>'
    assert checked(tmp_path, body) == (
        0,
        "docs: 2 pages, 1 internal links, 0 wrong; 1 external not followed\n",
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="gone.html">x</a>', "gone.html: there is no such file"),
        ('<a href="other.html#gone">x</a>', "other.html#gone: there is no such anchor"),
        ('<a href="#gone">x</a>', "#gone: there is no such anchor"),
        ('<script src="https://example.invalid/x.js"></script>', "fetches https://example.invalid/x.js"),
    ],
)
def test_what_leads_nowhere_is_named(tmp_path: Path, body: str, said: str) -> None:
    status, out = checked(tmp_path, body)
    assert status == 1
    assert f"page.html: {said}\n" in out


def test_a_style_sheet_from_elsewhere_is_named(tmp_path: Path) -> None:
    head = '<link rel="stylesheet" href="https://example.invalid/x.css">'
    assert checked(tmp_path, "", head)[0] == 1
