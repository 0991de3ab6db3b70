"""Processes that stand still with all of their threads, and go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.halting import halt, halted, stands_still

THREADS = """
import sys, threading
for _ in range(20):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.stdout.write("up\\n"); sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == "up\n"
        yield made
        made.kill()


def test_every_thread_stands_still_when_halt_returns_and_goes_on_afterwards(
    process: subprocess.Popen[str],
) -> None:
    assert not stands_still(process.pid)
    with halted([process.pid]):
        assert stands_still(process.pid)
    process.communicate("", timeout=30)  # it reads the end of its input
    assert process.returncode == 0


def test_one_that_was_killed_meanwhile_is_no_error(process: subprocess.Popen[str]) -> None:
    with halted([process.pid]):
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_is_no_more_cannot_be_halted(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(30)
    with pytest.raises(ProcessLookupError):
        halt(process.pid)
