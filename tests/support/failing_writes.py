"""A KvdConnector whose writes to a decoder can be made to fail, for tests with real engines.

An engine gets it by ``kv_connector_module_path``. Files in the folder that the environment names say how writes fail:
``refuse``, they are not started; ``fail``, they are started, and then said to have failed: their bytes may land.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from kvd.backends.contract import State
from kvd.backends.errors import TransferRefused
from kvd.topology.descriptors import Descriptors
from kvd.vllm.target import Piece, Target
from kvd.vllm.write_lane import WriteLanes

FOLDER = "KVCTL_TEST_FAILING_WRITES"
REASON = "a test let it fail"


def environment(folder: Path) -> Mapping[str, str]:
    """What an engine needs in its environment; the files are to be made in ``folder``."""
    places = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, places))}


def _post(lanes: WriteLanes, target: Target, rows: Descriptors, layers: dict[str, int], epoch: int) -> Piece:
    folder = Path(os.environ[FOLDER])
    if (folder / "refuse").exists():
        raise TransferRefused(REASON)
    piece = _really_post(lanes, target, rows, layers, epoch)
    if (folder / "fail").exists():
        transfer = piece.transfer
        transfer.state, transfer.reason, transfer.ended = State.FAILED, REASON, time.monotonic()
    return piece


if FOLDER in os.environ:  # in an engine; a test only looks up the names
    from kvd.vllm.connector import KvdConnector  # noqa: F401 - vLLM looks it up here

    _really_post = WriteLanes.post
    setattr(WriteLanes, "post", _post)  # noqa: B010 - mypy knows methods only as what they were
