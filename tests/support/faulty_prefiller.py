"""A KvdConnector that goes wrong when a test wants it to, for tests with real engines that push.

An engine gets it by ``kv_connector_module_path``. Files in the folder that the environment names say what happens:
``refuse``, writes to the decoder are not started; ``fail``, they are started, and then said to have failed: their bytes
may land; ``stop``, the process stops itself (SIGSTOP) in the middle of the next prompt that it computes for a push, and
takes the file away before it does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from kvd.backends.contract import State
from kvd.backends.errors import TransferRefused
from kvd.topology.descriptors import Descriptors
from kvd.worker.orders import StepOrders
from kvd.worker.push.prefiller import Pushing
from kvd.worker.push.target import Post, PushTarget
from kvd.worker.push.write_lanes import WriteLanes

FOLDER = "KVCTL_TEST_FAULTS"
REASON = "a test let it fail"


def environment(folder: Path) -> Mapping[str, str]:
    """What an engine needs in its environment; the files are to be made in ``folder``."""
    places = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, places))}


def _post(
    lanes: WriteLanes, target: PushTarget, rows: Descriptors, layers: dict[str, int], epoch: int
) -> Post:
    folder = Path(os.environ[FOLDER])
    if (folder / "refuse").exists():
        raise TransferRefused(REASON)
    piece = _really_post(lanes, target, rows, layers, epoch)
    if (folder / "fail").exists():
        transfer = piece.transfer
        transfer.state, transfer.reason, transfer.ended = State.FAILED, REASON, time.monotonic()
    return piece


def _begin(pushing: Pushing, orders: StepOrders) -> bool:
    begun = _really_begin(pushing, orders)
    file = Path(os.environ[FOLDER], "stop")
    if any(step.total < 4 * step.held < 3 * step.total for step in orders.pushes) and file.exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    return begun


if FOLDER in os.environ:  # in an engine; a test only looks up the names
    from kvd.vllm.connector import KvdConnector  # noqa: F401 - vLLM looks it up here

    _really_post, _really_begin = WriteLanes.post, Pushing.begin
    setattr(WriteLanes, "post", _post)  # noqa: B010 - mypy knows methods only as what they were
    setattr(Pushing, "begin", _begin)  # noqa: B010
