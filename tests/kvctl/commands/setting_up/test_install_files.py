"""`kvctl install-files`: what a host finds afterwards, and what is left alone."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvctl.commands.setting_up import install_files
from kvctl.errors import EXIT_CODES
from kvctl.main import group

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


@pytest.fixture(autouse=True)
def _kvd_tells_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its flags: asking it takes two processes."""
    monkeypatch.setattr(install_files, "_page_of_kvd", TOLD)


TOLD = functools.cache(install_files._page_of_kvd)


def test_everything_goes_below_the_prefix_once_and_a_dry_run_writes_nothing(run: Run, tmp_path: Path) -> None:
    prefix = tmp_path / "usr"
    arguments = ("install-files", "--prefix", prefix, "-o", "json")
    promised = json.loads(run(*arguments, "--dry-run").out)
    assert promised["dry_run"]
    assert not prefix.exists()
    made = json.loads(run(*arguments).out)
    assert made["files"] == promised["files"]
    assert {one["state"] for one in made["files"]} == {"made"}
    paths = {Path(one["path"]).relative_to(prefix).as_posix() for one in made["files"]}
    assert paths == {
        path.relative_to(prefix).as_posix()
        for path in prefix.rglob("*")
        if path.is_symlink() or path.is_file()
    }
    assert {
        "share/bash-completion/completions/kvctl", "share/zsh/site-functions/_kvctl", "share/man/man8/kvd.8",
        "share/fish/vendor_completions.d/kvctl.fish", "share/doc/kvctl/deploy.md", "bin/kvd", "bin/kvctl",
    } <= paths  # fmt: skip
    unit = (prefix / "lib/systemd/system/kvd.service").read_text()
    [start] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert start == f"ExecStart={(prefix / 'bin/kvd').readlink()}"

    changed = prefix / "share/doc/kvctl/deploy.md"
    changed.write_text("of an older version")
    (prefix / "bin/kvd").unlink()
    (prefix / "bin/kvd").write_text("somebody's own")
    again = {Path(one["path"]): one for one in json.loads(run(*arguments).out)["files"]}
    assert again.pop(changed)["state"] == "replaced"
    left = again.pop(prefix / "bin/kvd")
    assert (left["state"], "it is no link" in left["reason"]) == ("left", True)
    assert {one["state"] for one in again.values()} == {"unchanged"}
    assert (prefix / "bin/kvd").read_text() == "somebody's own"
    assert changed.read_text().startswith("# Several hosts")

    name = "kvctl-connector-config"
    page = (prefix / f"share/man/man1/{name}.1").read_text()
    assert "\\-\\-role" in page
    assert all(meaning in page for _, meaning in EXIT_CODES)
    pages = {path.stem for path in (prefix / "share/man/man1").iterdir()}
    commands = {f"kvctl-{row.name}" for row in group().rows}
    below = {f"kvctl-{row.name}-{child.name}" for row in group().rows for child in row.rows}
    assert pages == {"kvctl"} | commands | below
    if groff := shutil.which("groff"):
        files = sorted((prefix / "share/man").rglob("*.[18]"))
        done = subprocess.run(
            [groff, "-man", "-ww", "-z", "-Tutf8", *files], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_packages_files_name_where_they_will_be(run: Run, tmp_path: Path) -> None:
    arguments = ("--root", tmp_path, "--prefix", "/usr", "--programs", "/opt/kvd/bin")
    assert run("install-files", *arguments).code == 0
    assert (tmp_path / "usr/bin/kvctl").readlink() == Path("/opt/kvd/bin/kvctl")
    assert "\nExecStart=/opt/kvd/bin/kvd\n" in (tmp_path / "usr/lib/systemd/system/kvd.service").read_text()


def test_a_prefix_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = run("install-files", "--prefix", tmp_path / "file")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert "cannot write" in outcome.err
