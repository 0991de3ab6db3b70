"""Engines of the demo and the tests wait without sched_yield: the switches for that do what they are used for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.servers import CALM

ASK_VLLM = """
import os, time
from vllm.distributed import utils
called = []
os.sched_yield = lambda: called.append("yield")
time.sleep = lambda seconds: called.append(f"sleep {seconds}")
utils.sched_yield()
utils.USE_SCHED_YIELD = False
utils.sched_yield()
print(called)
"""


def output(code: str, **environment: str) -> str:
    env = os.environ | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_sleeps_where_its_switch_is_off() -> None:
    assert output(ASK_VLLM) == "['yield', 'sleep 0']"


def test_processes_of_served_engines_sleep_where_they_would_yield() -> None:
    code = "import os, time; time.sleep = print; os.sched_yield()"
    assert output(code, **CALM) == "0"
