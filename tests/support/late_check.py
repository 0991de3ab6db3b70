"""A KvdConnector that asks whether a prefix was still held when a test lets it, after all of it was read.

An engine gets it by ``kv_connector_module_path``. While the folder that the environment names has a file ``hold``, each
check waits for that to go; a file ``read`` says that one waits. ``before`` and ``begun`` are the same for loads of
which nothing is posted yet. While it has a file ``quiet`` no engine tells hints.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvd.vllm.prefixes.telling import HintTeller
from kvd.worker.load import Load
from kvd.worker.pull import pieces, reader
from kvd.worker.pull.checked import CheckedReads

FOLDER = "KVCTL_TEST_LATE_CHECK"


def environment(folder: Path) -> Mapping[str, str]:
    """What an engine needs in its environment; the files are made in ``folder``."""
    places = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, places))}


def _changed(teller: HintTeller) -> None:
    if not (Path(os.environ[FOLDER]) / "quiet").exists():
        _really_changed(teller)


def _check(checked: CheckedReads, load: Load, report: Callable[[], None]) -> None:
    folder = Path(os.environ[FOLDER])

    def wait() -> None:
        (folder / "read").touch()
        while (folder / "hold").exists():
            time.sleep(0.005)
        _really_check(checked, load, report)

    if (folder / "hold").exists():
        threading.Thread(target=wait, daemon=True).start()
    else:
        _really_check(checked, load, report)


def _post(load: Load, *given: Any) -> None:
    folder = Path(os.environ[FOLDER])
    if (folder / "before").exists():
        (folder / "begun").touch()
        while (folder / "before").exists():
            time.sleep(0.005)
    pieces.post(load, *given)


if FOLDER in os.environ:  # in an engine; a test only looks up the names
    from kvd.vllm.connector import KvdConnector  # noqa: F401 - vLLM looks it up here

    _really_check, _really_changed = CheckedReads.check, HintTeller.changed
    setattr(CheckedReads, "check", _check)  # noqa: B010 - mypy knows methods only as what they were
    setattr(reader, "post", _post)  # noqa: B010
    setattr(HintTeller, "changed", _changed)  # noqa: B010
