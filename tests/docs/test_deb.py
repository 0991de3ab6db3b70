"""The Debian package: what is in it runs, from where it will be, with the unit that names it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed here")
def test_the_package_has_an_environment_that_runs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    built = subprocess.run(
        [sys.executable, ROOT / ".ci" / "deb", tmp_path, "--compression", "none"],
        env=plain, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    package, host = built.stdout.strip(), tmp_path / "host"
    subprocess.run(["dpkg-deb", "--extract", package, host], check=True)
    site = host / f"opt/kvd/lib/python3.{sys.version_info[1]}/site-packages"
    for name in ("kvctl", "kvd"):
        assert (host / "usr/bin" / name).readlink() == Path("/opt/kvd/bin", name)
        script = host / "opt/kvd/bin" / name
        assert script.stat().st_mode & 0o777 == 0o755
        # By this Python, without any other package: the environment's own is the Debian host's.
        done = subprocess.run(
            [sys.executable, "-P", "-S", "-B", script, "--version"],
            env=plain | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"{name} 0.1.0\n"), done.stderr
    textual = [sys.executable, "-P", "-S", "-B", "-c", "import kvctl.top.app"]  # kvctl top's full screen
    subprocess.run(textual, env=plain | {"PYTHONPATH": str(site)}, check=True)
    unit = (host / "usr/lib/systemd/system/kvd.service").read_text()
    assert "\nExecStart=/opt/kvd/bin/kvd\n" in unit
    assert (host / "usr/share/man/man8/kvd.8").exists()
    assert (host / "usr/share/doc/kvctl/deploy.md").exists()
    assert not list(host.rglob("*.pyc"))
    control = tmp_path / "control"
    subprocess.run(["dpkg-deb", "--control", package, control], check=True)
    assert f"Depends: python3 (>= 3.{sys.version_info[1]})" in (control / "control").read_text()
    for maintainers in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", control / maintainers], check=True)
    assert "/opt/kvd/bin/kvd init\n" in (control / "postinst").read_text()
