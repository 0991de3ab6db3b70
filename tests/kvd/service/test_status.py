"""What kvd says of itself: its versions, of the start and of now, and its time of day."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.daemons import daemons


def installed(folder: Path, version: str) -> None:
    """Have ``folder`` look as if kvctl of that version were installed in it."""
    for old in folder.glob("kvctl-*.dist-info"):
        old.rename(folder / f"kvctl-{version}.dist-info")
    made = folder / f"kvctl-{version}.dist-info"
    made.mkdir(exist_ok=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvctl\nVersion: {version}\n")


def test_a_package_that_is_upgraded_under_a_running_kvd_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    installed(packages, "1.0")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    with daemons() as (kvd,):
        before = kvd.status()
        assert (before.version, before.installed) == ("1.0", "1.0")
        installed(packages, "2.0")
        after = kvd.status()
        assert (after.version, after.installed) == ("1.0", "2.0")


def test_it_tells_its_time_of_day() -> None:
    with daemons() as (kvd,):
        earliest = time.time()
        clock = kvd.status().clock
        assert clock is not None
        assert earliest <= clock <= time.time()
