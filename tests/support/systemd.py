"""A systemd of the tests' own: process 1 of new namespaces, over this machine's files (`boot_systemd`)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemons import ROOT, wait_for

INSIDE = "/opt/kvd"
"""Where the machine has this checkout, Python and its packages."""
PYTHON = f"{INSIDE}/python/bin/python3"
PATHS = f"{INSIDE}/checkout:{INSIDE}/checkout/daemon:{INSIDE}/packages"
BOOT_SECONDS = 60.0


class NoSystemd(Exception):
    """Why systemd cannot be started here."""


@dataclass(frozen=True)
class Machine:
    """A running one. ``pid`` is its process 1 as seen from here."""

    pid: int

    def command(self, *argv: str) -> list[str]:
        """A command line that runs another one inside, as root."""
        names = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        variables = (
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"PYTHONPATH={PATHS}",
        )
        enter = ("nsenter", "--target", str(self.pid), *names, "--root", "--wd=/")
        return [*enter, "env", "-i", *variables, "PYTHONDONTWRITEBYTECODE=1", *argv]

    def run(self, *argv: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command inside; what came of it."""
        return subprocess.run(
            self.command(*argv), capture_output=True, text=True, timeout=seconds, check=False
        )

    def kvctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run kvctl inside."""
        return self.run(PYTHON, "-c", "from kvctl.main import run; run()", *arguments)

    def systemctl(self, *arguments: str) -> str:
        """Give systemd an order and take its answer; AssertionError with what the unit logged where it fails."""
        done = self.run("systemctl", *arguments)
        assert done.returncode == 0, f"{done.stderr}\n{self.log}"
        return done.stdout.strip()

    def shows(self, name: str) -> str:
        """A property of the unit."""
        return self.systemctl("show", "kvd", "--property", name, "--value")

    @property
    def log(self) -> str:
        """What the unit wrote."""
        return self.run("journalctl", "--unit", "kvd", "--no-pager").stdout

    def write(self, path: str, text: str) -> None:
        """A file inside that every user may read."""
        there = Path(f"/proc/{self.pid}/root{path}")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text)


@contextmanager
def booted() -> Iterator[Machine]:
    """A machine that systemd has started up. Raises `NoSystemd` where there can be none."""
    tools = ("systemctl", "unshare", "nsenter", "useradd", "ip")
    if os.geteuid():
        raise NoSystemd("namespaces with a systemd in them take root")
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        raise NoSystemd(f"{', '.join(missing)} not installed here")
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder, Path(folder, "log").open("w+") as log:
        work = Path(folder, "work")
        work.mkdir()
        outer = subprocess.Popen(
            [ROOT / "tests/support/boot_systemd", work, ROOT, sys.base_prefix, sysconfig.get_path("purelib")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield _up(outer, Path(log.name))
        finally:
            if inner := _systemd_under(outer.pid):
                os.kill(inner, signal.SIGKILL)  # and with process 1 all others inside
            elif outer.poll() is None:
                os.killpg(outer.pid, signal.SIGKILL)
            outer.wait(BOOT_SECONDS)


def _up(outer: subprocess.Popen[bytes], log: Path) -> Machine:
    """The machine, once its basic.target is reached. Raises `NoSystemd` where that does not come."""
    try:
        pid = wait_for(lambda: -1 if outer.poll() is not None else _systemd_under(outer.pid), BOOT_SECONDS)
        machine = Machine(pid)
        wait_for(
            lambda: pid < 0 or machine.run("systemctl", "is-active", "basic.target").returncode == 0,
            BOOT_SECONDS,
        )
    except AssertionError:
        raise NoSystemd(
            f"systemd is not up in namespaces within {BOOT_SECONDS:g} s: {log.read_text()}"
        ) from None
    if pid < 0:
        raise NoSystemd(f"systemd does not start in namespaces: {log.read_text()}")
    assert machine.run("ip", "link", "set", "lo", "up").returncode == 0
    return machine


def _systemd_under(pid: int) -> int:
    """The process 1 of a namespace among a process's descendants, once it is systemd; 0 before."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0  # it has just ended
    return next((found for child in children if (found := _systemd_under(int(child)))), 0)
