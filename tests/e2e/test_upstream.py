"""vLLM's own tests of connectors pass with KvdConnector: those that need no server (docs/upstream-tests.md)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.daemons import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_vllms_tests_of_connectors_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
