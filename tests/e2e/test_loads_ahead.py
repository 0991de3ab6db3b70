"""Loads that begin as their step is scheduled: a real worker, a real kvd and vLLM's own asynchronous scheduler.

vLLM does not schedule asynchronously on CPUs. So benchmarks/step_cost.py steps the engine as vLLM's core does then, and
looks at every block that was loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.daemons import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROUNDS = 3


@pytest.mark.parametrize("more", [(), ("--busy",)], ids=["idle", "busy"])
def test_a_load_that_begins_before_its_step_brings_every_block(more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.step_cost", "--tokens", "512", "--ways", "kvd", "--json"]
    done = subprocess.run(
        [*command, "--rounds", str(ROUNDS), *more],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "daemon"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert found["wrong blocks"] == 0
    assert found["loads left to their step"] == 0
