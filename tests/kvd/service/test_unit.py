"""The systemd unit: what kvd relies on stands in it."""

from __future__ import annotations

import configparser
import shutil
import subprocess

import pytest

from tests.support.daemons import ROOT

UNIT = ROOT / "configs" / "systemd" / "kvd.service"


def test_the_unit_says_what_kvd_needs() -> None:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    service = parser["Service"]
    assert service["Type"] == "notify"
    assert service["Restart"] == "always"
    assert service["RuntimeDirectory"] == service["StateDirectory"] == "kvd"
    assert service["LimitMEMLOCK"] == "infinity"
    assert float(service["WatchdogSec"]) > 1
    assert "HUP" in service["ExecReload"]
    # pidfds need the workers' processes to be visible.
    assert not {"ProtectProc", "PrivatePIDs", "ProcSubset"} & set(service)
    assert "AF_UNIX" in service["RestrictAddressFamilies"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_finds_no_fault() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, check=False
    )
    assert not [line for line in done.stderr.splitlines() if "kvd.service" in line and "User" not in line]
