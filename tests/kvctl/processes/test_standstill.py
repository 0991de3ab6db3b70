"""A machine that stood still, which for a process is the same as being stopped itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.support.halting import halted
from tests.support.standstill import Standstill, lost_seconds

WATCHES = """
import os, time
from tests.support.standstill import watching
with watching(0.5) as found:
    print("up", flush=True)
    while len(found) < len(os.sched_getaffinity(0)):
        time.sleep(0.01)
    for one in found:
        print(one.core, one.seconds)
"""


def test_every_core_tells_how_long_it_stood_still() -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHES], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        with halted([process.pid]):
            began = time.monotonic()
            time.sleep(1.0)  # how long this takes is what is to be found
            stood = time.monotonic() - began
        said, _ = process.communicate(timeout=30)
    found = [line.split() for line in said.splitlines()]
    assert {int(core) for core, _ in found} == os.sched_getaffinity(0)
    longest = max(float(seconds) for _, seconds in found)
    assert stood - 0.2 <= longest


def test_what_is_lost_is_what_the_worst_core_lost_in_all() -> None:
    stuttering = [Standstill(core, float(i), 0.75) for i in range(4) for core in (0, 1)]
    assert lost_seconds(stuttering) == 3.0
    assert lost_seconds([*stuttering, Standstill(1, 9.0, 0.5)]) == 3.5
    assert lost_seconds([]) == 0.0
