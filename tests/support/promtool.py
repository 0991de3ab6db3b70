"""promtool, which checks rules and alerts as Prometheus reads them."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.daemons import ROOT


def promtool() -> str:
    """Its path; `.ci/promtool` fetches it where it is not installed. Skips the test where no package can be had."""
    done = subprocess.run([ROOT / ".ci" / "promtool"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())
    return done.stdout.strip()
