"""One kvd of a test's own, without the second one that the demo has."""

from __future__ import annotations

from pathlib import Path

from kvctl.processes.daemons import Kvd, launch


def start_kvd(name: str, directory: Path, *, listen: str = "127.0.0.1:0", timeout: float = 30.0) -> Kvd:
    """Start a kvd whose files all lie in ``directory`` and wait until it answers.

    It ends with the thread that started it. Raises `DaemonStartFailed`.
    """
    kvd = launch(name, directory, listen, {})
    try:
        kvd.wait_ready(timeout)
    except BaseException:
        kvd.stop()
        raise
    return kvd
