"""Runs a module as a program that ends with its parent: `python -m kvctl.processes.tied PARENT MODULE [ARGUMENT...]`.

PARENT is the parent's process id. kvctl ends what it started itself; this is for the case that it is killed.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def command(module: str, *arguments: str) -> Sequence[str]:
    """The command line that runs ``module`` tied to this process.

    The kernel ties a child to the *thread* that starts it, so start it from one that lasts.
    """
    return [sys.executable, "-m", "kvctl.processes.tied", str(os.getpid()), module, *arguments]


def main() -> None:
    """Tie this process to its parent, then become the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before we were tied to it
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; the manual page of the same name lists them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
