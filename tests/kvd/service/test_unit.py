"""The systemd unit: what kvd relies on stands in it."""

from __future__ import annotations

import configparser
import shutil
import subprocess

import pytest

from tests.support.daemons import ROOT

UNIT = ROOT / "configs" / "systemd" / "kvd.service"
MOST_OPEN = 1.5
"""Of `systemd-analyze security`, where 10 is the worst; the unit says why the rest is open."""


def test_the_unit_says_what_kvd_needs() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)  # SystemCallFilter= adds up
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    service = parser["Service"]
    assert service["Type"] == "notify"
    assert service["Restart"] == "always"
    assert service["RuntimeDirectory"] == service["StateDirectory"] == "kvd"
    assert service["LimitMEMLOCK"] == "infinity"
    assert float(service["WatchdogSec"]) > 1
    assert "HUP" in service["ExecReload"]
    # Clients are known by the user and the process that the kernel names, as the host counts them.
    assert not {"PrivateUsers", "PrivatePIDs"} & set(service)
    assert "AF_UNIX" in service["RestrictAddressFamilies"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_finds_no_fault() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, check=False
    )
    assert not [line for line in done.stderr.splitlines() if "kvd.service" in line and "User" not in line]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_finds_little_that_is_open() -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_OPEN * 10:g}", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if "✓" not in line)
