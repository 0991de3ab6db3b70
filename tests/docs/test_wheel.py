"""What the wheel carries besides the code, so that an installed kvd and kvctl need no checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.shipped import PLACES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    [file] = place.glob("kvctl-*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


def test_all_that_is_shipped_is_in_it(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    for name, place in PLACES.items():
        at = ROOT / place
        files = [at] if at.is_file() else [path for path in at.rglob("*") if path.is_file()]
        assert files
        for file in files:
            below = file.relative_to(at).as_posix()
            assert f"kvd/share/{name}{f'/{below}' * (below != '.')}" in held


def test_pages_that_messages_name_are_in_it(wheel: zipfile.ZipFile) -> None:
    sources = [path for top in ("kvctl", "daemon") for path in (ROOT / top).rglob("*.py")]
    named = {page for path in sources for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())}
    assert {"docs/deploy.md", "docs/connector.md"} <= named
    held = set(wheel.namelist())
    assert {page for page in named if f"kvd/share/{page}" not in held} == set()


def test_kvd_of_a_wheel_makes_what_a_host_needs_from_it(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    (tmp_path / "image/etc").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "kvd.service", "init", "--dry-run", "--root", tmp_path / "image"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "would make" in done.stdout
